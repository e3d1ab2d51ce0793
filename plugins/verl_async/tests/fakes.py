"""A trainer and rollout workers in memory, and the small jobs that tests run on them."""

from __future__ import annotations

import asyncio
import inspect
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from plugins.verl_async.tests.fake_rollout import STOP, FakeRollout
from verl_async.algorithms.algorithm import Algorithm
from verl_async.config import AlgorithmConfig, RolloutConfig, TrainJob
from verl_async.data.prompts import Prompt
from verl_async.data.reward_pool import Score
from verl_async.errors import RewardError
from verl_async.orchestrator.actors import BucketDelivery
from verl_async.orchestrator.assembly import Actors, Watchers, assemble_training
from verl_async.orchestrator.batches import build_sequences, with_advantages
from verl_async.orchestrator.samples import EncodedPrompt, PromptInstance, ScoredGroup
from verl_async.orchestrator.scoring import Scorer
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.workflow import Trajectory
from verl_async.rollout.in_process import InlineTransport
from verl_async.rollout.interface import Generation, SamplingParams
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.train_step import StepReport
from verl_engine.engine.weights.bucket import WeightBucket

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from verl_async.data.rewards import Sample
    from verl_async.orchestrator.actors import RankBatches
    from verl_async.orchestrator.async_training import AsyncTraining
    from verl_async.orchestrator.inputs import ModelTexts
    from verl_async.orchestrator.policy_update import PolicyUpdate
    from verl_engine.batch import sequence
    from verl_engine.engine.base import LossFn
    from verl_engine.engine.train_step import Normalizer


class FakeTrainer:
    """Counts steps; its weights are its step count, sent in `num_buckets` buckets through two slots."""

    def __init__(self, data_parallel_size: int = 1, num_buckets: int = 3, step_s: float = 0.0) -> None:
        self.data_parallel_size = data_parallel_size
        self.num_buckets = num_buckets
        self.step_s = step_s
        self.num_steps = 0
        self.batches: list[RankBatches] = []
        self.losses: list[LossFn] = []
        self.temperatures: list[float] = []
        self.normalizers: list[Normalizer] = []
        self.num_inferred = 0
        self.slots = [0, 0]
        self.num_open = 0
        self.applied = True
        self.kept: dict[str, int] = {}
        """By tag, the step count then."""

    async def train_batch(
        self, batches: RankBatches, loss_fn: LossFn, temperature: float, normalizer: Normalizer = "tokens"
    ) -> StepReport:
        await asyncio.sleep(self.step_s)
        self.num_steps += 1
        self.batches.append(batches)
        self.losses.append(loss_fn)
        self.temperatures.append(temperature)
        self.normalizers.append(normalizer)
        sequences = [one for rank in batches for group in rank for one in group]
        return StepReport(
            loss=float(self.num_steps),
            metrics={"ratio": 1.0 + self.num_steps},
            num_loss_tokens=sum(one.num_loss_tokens for one in sequences),
            num_tokens=sum(map(len, sequences)),
            num_micro_batches=len(batches[0]),
            optimizer=OptimizerStep(grad_norm=0.5, applied=self.applied, learning_rate=0.1 * self.num_steps),
        )

    async def keep_weights(self, tag: str) -> None:
        await asyncio.sleep(0)
        self.kept[tag] = self.num_steps

    async def infer_batch(
        self, batches: RankBatches, temperature: float, tag: str | None = None
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Each token's log-prob is minus its id, and minus 1000 for each step made."""
        await asyncio.sleep(0)
        num_steps = self.num_steps if tag is None else self.kept[tag]
        self.num_inferred += 1
        self.temperatures.append(temperature)
        return [
            [[(-one.token_ids - 1000.0 * num_steps).astype(np.float32) for one in group] for group in rank]
            for rank in batches
        ]

    async def infer_reference(
        self, batches: RankBatches, temperature: float
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Each token's log-prob is minus half its id."""
        await asyncio.sleep(0)
        self.num_inferred += 1
        self.temperatures.append(temperature)
        return [[[(-0.5 * one.token_ids).astype(np.float32) for one in group] for group in rank] for rank in batches]

    async def plan_weight_buckets(self, bucket_bytes: int, dtype: str) -> list[WeightBucket]:
        assert (bucket_bytes, dtype) == (256 * 2**20, "float32")
        return [WeightBucket((), 64)] * self.num_buckets

    async def open_transport(self) -> InlineTransport:
        self.num_open += 1
        return InlineTransport()

    async def release_transport(self) -> None:
        self.num_open -= 1

    async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
        assert self.num_open == 0, "names of buffers are left behind"
        await asyncio.sleep(0)
        content = 1000 * self.num_steps + index
        self.slots[slot] = content
        return BucketDelivery((self.slots, slot), zlib.crc32(str(content).encode()))

    async def save_pretrained(self, folder: Path) -> None:
        """Nothing to write."""


@dataclass
class FakeListener:
    """Remembers what it was told."""

    statuses: list[str] = field(default_factory=list)
    steps: list[dict[str, float]] = field(default_factory=list)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def on_status(self, text: str) -> None:
        self.statuses.append(text)

    def on_note(self, text: str) -> None:
        self.statuses.append(text)

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        assert step == len(self.steps) + 1 <= num_steps
        self.steps.append(dict(metrics))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((step, dict(metrics)))


class FakeTexts:
    """A `ModelTexts` whose answers are scored by `reward_of`."""

    chat_settings: Mapping[str, Any] = {}

    def __init__(self, reward_of: Any = None) -> None:
        self.reward_of = reward_of or (lambda solution: float(len(solution)))

    def scorer(self, _: object, __: object, say: Any, timeline: Timeline) -> Scorer:
        return make_scorer(self.reward_of, say, timeline=timeline)

    def sampling(self, config: Any, held_out: Any = None) -> SamplingParams:
        return SamplingParams(config.max_response_tokens, (held_out or config).temperature)


class FakePool:
    """Scores in this process; a reward that is None stands for a sample that could not be scored."""

    def __init__(self, reward_of: Any) -> None:
        self.reward_of = reward_of

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def score(self, sample: Sample) -> Score:
        try:
            found = self.reward_of(sample.solution)
            reward = await found if inspect.isawaitable(found) else found
        except Exception as error:
            where = f"sample {sample.sample_id} (prompt row {sample.prompt.index})"
            raise RewardError(f"{where} raised {type(error).__name__}") from error
        errors = (f"sample {sample.sample_id} failed",) if reward is None else ()
        return Score(reward, sample.is_exact, {"length": len(sample.solution)}, errors)


def make_scorer(
    reward_of: Any,
    say: Any = print,
    data_sources: frozenset[str] = frozenset(),
    timeline: Timeline | None = None,
) -> Scorer:
    """Score the decoded response, which is its tokens as text: ``11 12``."""

    def decode(token_ids: list[int], **_: object) -> str:
        return " ".join(str(token) for token in token_ids if token != STOP)

    tokenizer = cast("Any", SimpleNamespace(decode=decode))
    return Scorer(FakePool(reward_of), tokenizer, say, timeline or Timeline(), data_sources)


def encoded_prompts(number: int, length: int = 2) -> list[EncodedPrompt]:
    """Prompts 10, 20, …: tokens equal to their number, and the right answer two tokens counted up from it."""
    return [
        EncodedPrompt(Prompt(row, "counting", "", f"{10 * row + 11} {10 * row + 12}", {}), (10 * row + 10,) * length)
        for row in range(number)
    ]


def make_group(
    number: int = 0, rewards: tuple[float, ...] = (0.0, 1.0), versions: tuple[int, ...] = (0, 0)
) -> ScoredGroup:
    """A finished group: each answer is tokens 11 and 12."""
    trajectories = tuple(Trajectory((Generation([11, 12], [-1.0, -2.0], list(versions), "stop"),)) for _ in rewards)
    exact = tuple(reward > 0 for reward in rewards)
    metrics: tuple[dict[str, float], ...] = ({},) * len(rewards)
    return ScoredGroup(PromptInstance(number, encoded_prompts(1)[0]), trajectories, rewards, exact, metrics)


def learned(groups: list[ScoredGroup], **algorithm: Any) -> list[sequence.Sequence]:
    """What a mini-batch trains on, with an algorithm of these settings; no column of a model."""
    loaded = Algorithm.load(AlgorithmConfig.model_validate(algorithm))
    return with_advantages(groups, build_sequences(groups, loaded.loss.columns, "rollout"), loaded)


def evaluation_section(every_steps: int | None = None, **sums: Any) -> dict[str, Any]:
    """An evaluation on one set."""
    return {"sets": {"sums": {"prompts": "held_out.jsonl", **sums}}, "every_steps": every_steps}


def train_job(**changes: dict[str, Any]) -> TrainJob:
    """A job of two steps of two prompts, each answered twice; `changes` by section."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": Path("some/model")},
        "data": {"prompts": Path("prompts.jsonl"), "shuffle": False},
        "rollout": {"n": 2, "max_response_tokens": 8, "timeout_s": 5.0},
        "reward": {"timeout_s": 1.0},
        "algorithm": {"drop_uniform_groups": False},
        "trainer": {"num_steps": 2, "mini_batch_size": 2, "timeout_s": 5.0},
        "weight_sync": {"timeout_s": 5.0},
    }
    for section, change in changes.items():
        sections[section] = sections.get(section, {}) | change
    engine = EngineConfig(backend="toy", learning_rate=0.1)
    rollout = RolloutConfig(**sections.pop("rollout"))
    return TrainJob.model_validate({"engine": engine, "rollout": rollout, **sections})


@dataclass
class NotingUpdate:
    """A `PolicyUpdate` that notes the groups it gets."""

    update: PolicyUpdate
    groups: list[list[ScoredGroup]]

    async def run(self, groups: list[ScoredGroup], since_sync: int) -> Mapping[str, float]:
        self.groups.append(groups)
        return await self.update.run(groups, since_sync)


@dataclass
class FakeRun:
    """A whole job on fakes."""

    job: TrainJob
    trainer: FakeTrainer = field(default_factory=FakeTrainer)
    rollouts: list[FakeRollout] = field(default_factory=lambda: [FakeRollout()])
    texts: FakeTexts = field(default_factory=FakeTexts)
    listener: FakeListener = field(default_factory=FakeListener)
    timeline: Timeline = field(default_factory=Timeline)
    groups: list[list[ScoredGroup]] = field(default_factory=list)
    """What each training step took."""

    def assemble(self, num_prompts: int = 5, num_held_out: int = 3) -> AsyncTraining:
        """Build the job; groups are noted as they are trained on."""
        training = assemble_training(
            self.job,
            cast("ModelTexts", self.texts),
            encoded_prompts(num_prompts),
            {name: encoded_prompts(num_held_out) for name in self.job.evaluation.sets} if self.job.evaluation else {},
            Actors(self.trainer, self.rollouts),
            Watchers(self.listener, self.timeline),
        )
        training.update = cast("Any", NotingUpdate(training.update, self.groups))
        return training

    async def run(self, timeout_s: float = 20.0) -> None:
        """Run to the end."""
        await asyncio.wait_for(self.assemble().run(), timeout_s)

    @property
    def instances(self) -> list[int]:
        """Numbers of the draws that were trained on, in order."""
        return [group.instance.number for groups in self.groups for group in groups]
