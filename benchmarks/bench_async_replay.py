"""The fully-async loop on a published profile, with a trainer and a rollout engine that sleep: how near to its bound?

The profile is that of Qwen2.5-Math-7B on 128 devices in verl's documentation of its fully-async trainer (colocated and
synchronous: 356 s a step, of which 178 s generate, 114 s update and 54 s recompute log-probs), scaled down in time and
in samples: 32 prompts of 8 samples a step, 16 optimizer steps, 64 slots. Lengths are log-normal by seed, the longest
ten times the mean, or those of a file; a token takes so long that the samples of one step alone take the profile's 178
s. Loop, dispatcher, Ray, scoring, staleness and weight sync are the job's own.
Wants a machine with nothing else to do: one that is busy delays what sleeps. Last line: JSON.

    fraction_of_bound            bound over the time that a step's work takes, while the pipeline is full. The bound is
                                 the larger of slot-seconds / slots and of update, log-probs and weight sync
    fraction_of_bound_few_slots  the same with 24 slots, where generation is the bottleneck; they rest during a sync
    fraction_of_bound_rewards    the same where each sample's reward takes as long as its generation
    speedup_vs_sync              over the same job on the same slots and trainer, on-policy: a step at a time
    *_s                          seconds of one step's work, in the profile's time
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from sleeping_engine import SleepingConfig, SleepingReward, installed, length_of, make_task, read_lengths

from verl_async.config import RayConfig, TrainJob
from verl_async.data.prompts import Prompt
from verl_async.orchestrator.actors import BucketDelivery
from verl_async.orchestrator.assembly import Actors, Watchers, assemble_training
from verl_async.orchestrator.inputs import ModelTexts
from verl_async.orchestrator.samples import EncodedPrompt, stream_seed
from verl_async.orchestrator.timeline import Timeline
from verl_async.ray.cluster import ray_cluster
from verl_async.ray.rollout import RayRolloutClient
from verl_async.rollout.in_process import InlineTransport
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.train_step import StepReport
from verl_engine.engine.weights.bucket import WeightBucket

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from verl_async.orchestrator.actors import RankBatches

GENERATION_S, UPDATE_S, LOG_PROBS_S, SYNC_S = 178.0, 114.0, 54.0, 10.0
PROMPTS, N, SLOTS, UPDATES = 32, 8, 64, 16
"""Of a step's work: prompts, and optimizer steps; samples of a prompt."""
MEAN, LONGEST, NUM_LENGTHS = 50, 500, 4096
"""Tokens."""
ASYNC = {"require_batches": 4, "trigger_parameter_sync_step": 4, "staleness_threshold": 0.5, "partial_rollout": True}
"""As in the profile."""
ON_POLICY = {"require_batches": UPDATES, "trigger_parameter_sync_step": 1, "staleness_threshold": 0.0}
FEW_SLOTS = 24
SEED = 0
FILLING, DRAINING = 2, 2
"""Steps' work at the beginning and the end that is not measured."""
BOUNDS = {"fraction_of_bound": 0.95, "fraction_of_bound_rewards": 0.9}


class SleepingTrainer:
    """A `Trainer` of one rank; all times are the profile's over `scale`."""

    data_parallel_size = 1

    def __init__(self, scale: float) -> None:
        self._scale = scale

    async def train_batch(self, batches: RankBatches, *_: object) -> StepReport:
        """Make an optimizer step."""
        await asyncio.sleep(UPDATE_S / UPDATES / self._scale)
        sequences = [one for group in batches[0] for one in group]
        step = OptimizerStep(grad_norm=1.0, applied=True, learning_rate=1.0)
        num_loss_tokens = sum(one.num_loss_tokens for one in sequences)
        return StepReport(0.0, {}, num_loss_tokens, sum(map(len, sequences)), len(batches[0]), step)

    async def infer_batch(
        self, batches: RankBatches, temperature: float, tag: str | None = None
    ) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Compute log-probs."""
        del temperature, tag
        await asyncio.sleep(LOG_PROBS_S / UPDATES / self._scale)
        return [[[np.full(len(one), -1.0, np.float32) for one in group] for group in rank] for rank in batches]

    async def infer_reference(self, *_: object) -> Any:
        """No job here has a reference."""
        raise AssertionError

    async def keep_weights(self, tag: str) -> None:
        """Keep nothing."""

    async def plan_weight_buckets(self, *_: object) -> list[WeightBucket]:
        """Plan one bucket."""
        return [WeightBucket((), 64)]

    async def open_transport(self) -> InlineTransport:
        """Send bytes."""
        return InlineTransport()

    async def release_transport(self) -> None:
        """There is nothing to remove."""

    async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
        """Take the time of a whole weight sync."""
        del index, slot
        await asyncio.sleep(SYNC_S / self._scale)
        content = np.zeros(64, np.uint8)
        return BucketDelivery(content, zlib.crc32(content.data))

    async def save_pretrained(self, folder: Path) -> None:
        """Nothing is saved."""


@dataclass
class Clock:
    """A `JobListener` that notes when steps end."""

    ends_s: list[float] = field(default_factory=list)

    def on_status(self, text: str) -> None:
        """Not of interest."""

    def on_note(self, text: str) -> None:
        """Not of interest."""

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Note the time."""
        del step, num_steps, metrics
        self.ends_s.append(time.monotonic())

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """There is none."""


@dataclass(frozen=True)
class Replay:
    """What all runs share."""

    texts: ModelTexts
    lengths: Path
    token_s: float
    scale: float

    def run(self, ahead: dict[str, Any], units: int, slots: int = SLOTS, *, has_rewards: bool = False) -> list[float]:
        """Run a job over the work of so many steps of the profile; returns when each was trained."""
        per_unit = UPDATES // ahead["require_batches"]
        reward = f"{SleepingReward.__module__}:{SleepingReward.__qualname__}"
        job = TrainJob.model_validate(
            {
                "model": {"path": self.texts.folder},
                "data": {"prompts": Path("none"), "shuffle": False, "seed": SEED},
                "engine": EngineConfig(backend="sleeping", learning_rate=1.0),
                "rollout": SleepingConfig(
                    backend="sleeping",
                    device="cpu",
                    n=N,
                    max_response_tokens=LONGEST,
                    max_batch_prompts=slots // N + 1,  # a group starts when there is room for all of it
                    token_s=self.token_s,
                    slots=slots,
                    lengths=self.lengths,
                ),
                "reward": {"function": reward, "config": {"token_s": self.token_s}, "max_async_calls": 1024}
                if has_rewards
                else {},
                "async_training": ahead,
                "algorithm": {"old_log_probs": "recompute", "drop_uniform_groups": False},
                "trainer": {"num_steps": units * per_unit, "mini_batch_size": PROMPTS // UPDATES},
            }
        )
        clock = Clock()
        asyncio.run(self._run(job, clock))
        return clock.ends_s[per_unit - 1 :: per_unit]

    async def _run(self, job: TrainJob, clock: Clock) -> None:
        client = RayRolloutClient(0, job.rollout, self.texts.folder, {"num_cpus": 1})
        await client.start()
        prompts = [EncodedPrompt(Prompt(0, "replay", "", "", {}), (4, 5, 6, 7))]
        actors = Actors(SleepingTrainer(self.scale), [client])
        await assemble_training(job, self.texts, prompts, {}, actors, Watchers(clock, Timeline())).run()
        await client.close()
        ray.kill(client.actor)  # the next needs its CPU


def unit_lengths(lengths: tuple[int, ...], unit: int) -> list[int]:
    """Lengths of the samples of one step's work, in the order in which they start."""
    numbers = range(unit * PROMPTS, (unit + 1) * PROMPTS)
    return [length_of(stream_seed(SEED, number, place), lengths) for number in numbers for place in range(N)]


def makespan(lengths: Iterable[int], slots: int) -> int:
    """Tokens until all samples have ended, each started in the first slot that is free."""
    ends = [0] * slots
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends)


def bound_s(lengths: Iterable[int], slots: int, token_s: float, scale: float) -> tuple[float, float]:
    """Seconds that generation, and those that the trainer, needs at least for some samples of one step's work."""
    return sum(lengths) * token_s / slots, (UPDATE_S + LOG_PROBS_S + SYNC_S) / scale


def draw_lengths(seed: int) -> list[int]:
    """Draw log-normal lengths with the mean and the longest that are asked for."""
    normal = np.random.default_rng(seed).standard_normal(NUM_LENGTHS)
    low, high, values = 0.0, 5.0, normal
    for _ in range(50):  # the wider, the longer the longest
        values = np.exp((low + high) / 2 * normal)
        is_wide = values.max() * MEAN > values.mean() * LONGEST
        low, high = (low, (low + high) / 2) if is_wide else ((low + high) / 2, high)
    return [max(1, round(float(value))) for value in values * LONGEST / values.max()]


def measure(replay: Replay, units: int, slots: int, *, has_rewards: bool = False) -> dict[str, float]:
    """One asynchronous run: seconds of a step's work, and of its bounds."""
    ends_s = replay.run(ASYNC, FILLING + units + DRAINING, slots, has_rewards=has_rewards)
    lengths = read_lengths(replay.lengths)
    bounds = [
        bound_s(unit_lengths(lengths, unit), slots, replay.token_s, replay.scale)
        for unit in range(FILLING, FILLING + units)
    ]
    generation_s, trainer_s = (fmean(one) for one in zip(*bounds, strict=True))
    step_s = (ends_s[FILLING + units - 1] - ends_s[FILLING - 1]) / units
    return {
        "fraction_of_bound": max(generation_s, trainer_s) / step_s,
        "step_s": step_s * replay.scale,
        "generation_bound_s": generation_s * replay.scale,
        "trainer_bound_s": trainer_s * replay.scale,
    }


def main() -> None:
    """Run all, and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=40.0, help="of time, profile over run (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="steps' work that is measured (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--lengths", type=Path, help="file of lengths in tokens, one a line, in place of drawn ones")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    options = parser.parse_args()
    with installed() as folder:
        make_task(folder)
        path = options.lengths or folder / "lengths"
        if not options.lengths:
            path.write_text("\n".join(map(str, draw_lengths(options.seed))), encoding="ascii")
        num_sync = max(1, options.steps // 2)
        alone = [makespan(unit_lengths(read_lengths(path), unit), SLOTS) for unit in range(1, 1 + num_sync)]
        token_s = GENERATION_S / options.scale / fmean(alone)
        replay = Replay(ModelTexts.load(folder / "model"), path.absolute(), token_s, options.scale)
        with ray_cluster(RayConfig(), 1, folder / "token"):
            metrics = measure(replay, options.steps, SLOTS)
            for suffix, slots, has_rewards in (("_few_slots", FEW_SLOTS, False), ("_rewards", SLOTS, True)):
                found = measure(replay, options.steps, slots, has_rewards=has_rewards)
                metrics |= {name + suffix: value for name, value in found.items()}
                if not options.json:
                    print(metrics)
            ends_s = replay.run(ON_POLICY, 1 + num_sync)
    metrics["sync_step_s"] = (ends_s[-1] - ends_s[0]) / num_sync * options.scale
    metrics["speedup_vs_sync"] = metrics["sync_step_s"] / metrics["step_s"]
    metrics["within_bounds"] = float(all(metrics[name] >= least for name, least in BOUNDS.items()))
    print(json.dumps({name: round(value, 4) for name, value in metrics.items()}))


if __name__ == "__main__":
    main()
