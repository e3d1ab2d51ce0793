"""Which prompts start when and at which worker, and how their samples become scored groups in the queue."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from verl_async.orchestrator.lanes import SealedBatch, StreamLane
from verl_async.orchestrator.waiting import task_group

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from verl_async.config import RolloutConfig
    from verl_async.orchestrator.lanes import Lane
    from verl_async.orchestrator.prompt_source import PromptSource
    from verl_async.orchestrator.rollout_worker import RolloutWorker
    from verl_async.orchestrator.sample_queue import SampleQueue
    from verl_async.orchestrator.sampler import Sampler
    from verl_async.orchestrator.samples import PromptInstance
    from verl_async.orchestrator.staleness import StalenessBudget


T = TypeVar("T")
WAITS: Final = ("room", "queue", "staleness")
"""What a prompt may wait for: a worker with room, room in the sample queue, the next weight sync."""


@dataclass(slots=True)
class Dispatcher:
    """Runs beside training until every prompt of the job was rolled out."""

    workers: Sequence[RolloutWorker]
    source: PromptSource
    budget: StalenessBudget
    queue: SampleQueue
    sampler: Sampler
    config: RolloutConfig
    put_timeout_s: float
    """How long the queue may stay full."""
    waited_s: dict[str, float] = field(
        default_factory=lambda: {"room": 0.0, "queue": 0.0, "staleness": 0.0}, init=False
    )
    """How long the next prompt waited for what."""
    _room: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """A worker has room for a further sample."""

    async def run(self) -> None:
        """Fill the queue.

        Raises:
            StuckError: the trainer did not take a group in time.
            EngineError: a worker failed, or a sample could not be scored.
        """
        async with task_group() as tasks:
            await (self._start_batches(tasks) if self.config.deterministic else self._start_prompts(tasks))

    async def _start_prompts(self, tasks: asyncio.TaskGroup) -> None:
        """Start each prompt as soon as a worker and the queue have room and staleness allows it."""
        while True:
            await self._timed("room", self._wait_for_room())
            await self._timed("queue", self.queue.wait_for_room())
            numbers = await self._timed("staleness", self.budget.acquire(1))
            if not numbers:
                return
            # All samples of a group at one worker, which reads their prompt once.
            worker = min(self.workers, key=lambda worker: worker.num_started)
            worker.num_started += self.config.n
            lane = StreamLane(worker, partial(self._has_generated, worker))
            tasks.create_task(self._roll_out(self.source.draw(numbers[0]), [lane] * self.config.n))

    async def _start_batches(self, tasks: asyncio.TaskGroup) -> None:
        """Divide what each weight sync grants into sealed batches, in the same way at each run."""
        while numbers := await self._timed("staleness", self.budget.acquire()):
            size = min(self.config.max_batch_prompts, -(-len(numbers) // len(self.workers)))
            for index, start in enumerate(range(0, len(numbers), size)):
                batch = SealedBatch(self.workers[index % len(self.workers)])
                for number in numbers[start : start + size]:
                    lanes = [batch.lane() for _ in range(self.config.n)]
                    tasks.create_task(self._roll_out(self.source.draw(number), lanes))

    async def _timed(self, reason: str, waiting: Awaitable[T]) -> T:
        started = time.monotonic()
        found = await waiting
        self.waited_s[reason] += time.monotonic() - started
        return found

    async def _wait_for_room(self) -> None:
        most = (self.config.max_batch_prompts - 1) * self.config.n
        while min(worker.num_started for worker in self.workers) > most:
            self._room.clear()
            await self._room.wait()

    def _has_generated(self, worker: RolloutWorker) -> None:
        worker.num_started -= 1
        self._room.set()

    async def _roll_out(self, instance: PromptInstance, lanes: Sequence[Lane]) -> None:
        group = await self.sampler.group(instance, lanes)
        await self.queue.put(group, self.put_timeout_s)
