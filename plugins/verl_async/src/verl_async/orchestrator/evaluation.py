"""How well the weights of one version answer held-out prompts, found out while training goes on."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Final

from verl_async.orchestrator.lanes import SealedBatch, StreamLane
from verl_async.orchestrator.pass_at_k import solved
from verl_async.orchestrator.samples import PromptInstance
from verl_async.orchestrator.timeline import Span
from verl_async.orchestrator.waiting import task_group, together, within

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.config import RolloutConfig
    from verl_async.evaluation_config import EvaluationSetConfig
    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.rollout_worker import RolloutWorker
    from verl_async.orchestrator.sampler import Sampler
    from verl_async.orchestrator.samples import EncodedPrompt, ScoredGroup
    from verl_async.orchestrator.timeline import Timeline

SEED: Final = 0x6576616C
"""Apart from the training streams, and the same at each evaluation, so that only the weights differ."""


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Held-out prompts, and how they are answered."""

    name: str
    config: EvaluationSetConfig
    prompts: Sequence[EncodedPrompt]
    sampler: Sampler

    @property
    def num_samples(self) -> int:
        """Samples of one evaluation."""
        return len(self.prompts) * self.config.num_samples

    def metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Return metrics by names that begin with the set's.

        Returns:
            ``response_tokens``, and what `Scorer.metrics` says of the samples that could be scored and of `solved`.
        """
        config = self.config
        more = partial(solved, num_samples=config.num_samples, correct_reward=config.correct_reward)
        metrics = self.sampler.scorer.metrics(groups, more)
        if lengths := [sum(one.in_loss) for group in groups for one in group.trajectories]:
            metrics["response_tokens"] = fmean(lengths)
        if len({encoded.prompt.data_source for encoded in self.prompts}) == 1:  # the same metrics once more
            metrics = {name: value for name, value in metrics.items() if not name.startswith("data_source/")}
        return {f"{self.name}/{name}": value for name, value in metrics.items()}


@dataclass(slots=True)
class Evaluation:
    """One evaluation after the other, by all rollout workers together, beside what they generate for training.

    An evaluation is pinned to the weights that it began with: whoever syncs weights awaits `generated` first.
    """

    sets: Sequence[EvaluationSet]
    workers: Sequence[RolloutWorker]
    timeline: Timeline
    listener: JobListener
    every_steps: int | None
    rollout: RolloutConfig
    stops_training: bool
    """Training waits for each to end: on-policy, so that nothing runs beside; with an aim, as it may be the last."""
    timeout_s: float
    """Of all samples of one evaluation; the limits for one sample are those of worker, workflow and reward."""
    has_reached_aim: bool = field(default=False, init=False)
    _generated: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _num_open: int = field(default=0, init=False)
    """Samples that may still ask for tokens."""
    _step: int = field(default=0, init=False)
    _start_s: float = field(default=0.0, init=False)
    _waited_s: float = field(default=0.0, init=False)
    _waits_since_s: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Begin with nothing to wait for."""
        self._generated.set()
        self._ended.set()

    @property
    def is_running(self) -> bool:
        """Whether one has begun and not ended."""
        return not self._ended.is_set()

    def is_due(self, step: int, num_steps: int) -> bool:
        """Tell whether to evaluate after `step` training steps: at both ends, and in between as configured."""
        return step in (0, num_steps) or (self.every_steps is not None and step % self.every_steps == 0)

    async def begin(self, step: int, num_steps: int, tasks: asyncio.TaskGroup) -> bool:
        """Begin where one is due; the last one, and one that stops training, is also waited for.

        Args:
            step: training steps made; the workers have just been given the weights.
            num_steps: of the whole job.
            tasks: runs it.
        Returns:
            Whether training has reached its aim.
        """
        if not self.is_due(step, num_steps):
            return False
        await self._wait_for(self._ended, "end before the next one was due")
        self._generated.clear()
        self._ended.clear()
        self._step, self._start_s, self._waited_s = step, self.timeline.now_s, 0.0
        self._num_open = sum(one.num_samples for one in self.sets)
        tasks.create_task(self._run())
        if self.stops_training or step == num_steps:
            await self._wait_for(self._ended, "end")
        return self.has_reached_aim

    async def generated(self) -> None:
        """Wait until no sample of an evaluation needs the weights any more."""
        await self._wait_for(self._generated, "finish generating for a weight sync")

    async def _wait_for(self, event: asyncio.Event, what: str) -> None:
        if event.is_set():
            return
        since_s = self._waits_since_s = self.timeline.now_s
        try:
            await within(self.timeout_s, f"the evaluation after step {self._step} did not {what}", event.wait())
        finally:
            self._waited_s, self._waits_since_s = self._wait_s, None
            self.timeline.record(Span("trainer", "wait for evaluation", since_s, self.timeline.now_s))

    @property
    def _wait_s(self) -> float:
        """How long the trainer has waited for the one that runs."""
        now_s = self.timeline.now_s
        return self._waited_s + (now_s - self._waits_since_s if self._waits_since_s is not None else 0.0)

    async def _run(self) -> None:
        self.listener.on_status(f"evaluating on {sum(len(one.prompts) for one in self.sets)} prompts")
        with self.timeline.span("evaluation", "evaluate"):
            metrics = await self.run()
        aims = {one.name: aim for one in self.sets if (aim := one.config.stop_at_exact_match) is not None}
        self.has_reached_aim = bool(aims) and all(
            metrics.get(f"{name}/exact_match", 0.0) >= aim for name, aim in aims.items()
        )
        times = {"wait_s": self._wait_s, "seconds": self.timeline.now_s - self._start_s}
        self.listener.on_evaluation(self._step, metrics | times)
        self.listener.on_status("training")
        self._generated.set()
        self._ended.set()

    async def run(self) -> dict[str, float]:
        """Answer and score all prompts; returns `EvaluationSet.metrics` of all sets."""
        asked = [
            (one, PromptInstance(number, encoded)) for one in self.sets for number, encoded in enumerate(one.prompts)
        ]
        shares = [asked[place :: len(self.workers)] for place in range(len(self.workers))]
        answer = self._answer_sealed if self.rollout.deterministic else self._answer
        answered = await together(*map(answer, self.workers, shares))
        groups: dict[str, list[ScoredGroup]] = {one.name: [] for one in self.sets}
        for (one, _), group in zip(chain.from_iterable(shares), chain.from_iterable(answered), strict=True):
            groups[one.name].append(group)
        return {name: value for one in self.sets for name, value in one.metrics(groups[one.name]).items()}

    @property
    def _room(self) -> int:
        """Samples at a time at one worker, as many as in training; a group goes to one worker, which reads it once."""
        most = max(one.config.num_samples for one in self.sets)
        return max(most, self.rollout.max_batch_prompts * self.rollout.n)

    async def _answer(
        self, worker: RolloutWorker, share: Sequence[tuple[EvaluationSet, PromptInstance]]
    ) -> list[ScoredGroup]:
        """Answer a share of the prompts, each as soon as there is room."""
        room, running = asyncio.Semaphore(self._room), []
        lane = StreamLane(worker, partial(self._has_generated, room))
        async with task_group() as tasks:
            for one, instance in share:
                for _ in range(one.config.num_samples):
                    await room.acquire()
                lanes = [lane] * one.config.num_samples
                running.append(tasks.create_task(one.sampler.group(instance, lanes)))
        return [task.result() for task in running]

    def _has_generated(self, room: asyncio.Semaphore) -> None:
        room.release()
        self._num_open -= 1
        if not self._num_open:
            self._generated.set()

    async def _answer_sealed(
        self, worker: RolloutWorker, share: Sequence[tuple[EvaluationSet, PromptInstance]]
    ) -> list[ScoredGroup]:
        """Answer a share of the prompts in batches that are the same at each run."""
        size = self._room // max(one.config.num_samples for one in self.sets)
        groups = []
        for start in range(0, len(share), size):
            batch = SealedBatch(worker)
            part = [
                (one, instance, [batch.lane() for _ in range(one.config.num_samples)])
                for one, instance in share[start : start + size]
            ]
            groups += await together(*(one.sampler.group(instance, lanes) for one, instance, lanes in part))
        return groups
