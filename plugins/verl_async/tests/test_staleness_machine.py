"""The staleness bound, whatever finishes when: hypothesis moves the workers and the trainer around a dispatcher."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plugins.verl_async.tests.fakes import encoded_prompts, make_scorer
from verl_async.config import AsyncTrainingConfig, RolloutConfig
from verl_async.orchestrator.dispatcher import Dispatcher
from verl_async.orchestrator.prompt_source import PromptSource
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.sample_queue import SampleQueue
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.staleness import StalenessBudget, prompts_between_syncs
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.workflow import SingleTurn
from verl_async.rollout.interface import Completion, Generation, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_async.rollout.interface import GenerationRequest

_NUM_SAMPLES = 2


class MovedClient:
    """Finishes a request when it is told to."""

    def __init__(self, index: int) -> None:
        self.name = f"rollouter-{index}"
        self.waiting: list[tuple[GenerationRequest, Callable[[Completion], None]]] = []

    def submit(self, requests: Sequence[GenerationRequest], on_completion: Any, **_: bool) -> None:
        self.waiting += [(request, on_completion) for request in requests]

    def finish(self, place: int, version: int) -> None:
        request, on_completion = self.waiting.pop(place)
        on_completion(Completion(request, 0, Generation([1], [-1.0], [version], "stop")))


class Schedules(RuleBasedStateMachine):
    """Draws settings, then who moves."""

    @initialize(
        threshold=st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.5]),
        sync_step=st.integers(1, 3),
        require_batches=st.integers(1, 2),
        size=st.integers(1, 3),
        num_steps=st.integers(1, 8),
        num_workers=st.integers(1, 3),
        room=st.integers(1, 4),
        queue_size=st.none() | st.integers(1, 3),
    )
    def start(self, **drawn: Any) -> None:
        self.per_step = drawn["require_batches"] * drawn["size"]
        self.sync_step, self.num_steps = drawn["sync_step"], drawn["num_steps"]
        config = AsyncTrainingConfig(
            staleness_threshold=drawn["threshold"],
            trigger_parameter_sync_step=drawn["sync_step"],
            require_batches=drawn["require_batches"],
        )
        self.limit = prompts_between_syncs(config, drawn["size"])
        self.most_stale = math.floor(drawn["threshold"] * self.sync_step * self.per_step + 1e-9)
        self.budget = StalenessBudget(self.limit, self.per_step * self.num_steps)
        self.queue = SampleQueue(drawn["queue_size"] or self.limit)
        self.clients = [MovedClient(index) for index in range(drawn["num_workers"])]
        self.room = drawn["room"]
        timeline = Timeline()
        self.dispatcher = Dispatcher(
            workers=[RolloutWorker(client, timeline, 60.0) for client in self.clients],  # type: ignore[arg-type]
            source=PromptSource(encoded_prompts(5), 0, False),
            budget=self.budget,
            queue=self.queue,
            sampler=Sampler(SingleTurn(), make_scorer(len, timeline=timeline), SamplingParams(8), 0),
            config=RolloutConfig(n=_NUM_SAMPLES, max_batch_prompts=self.room),
            put_timeout_s=60.0,
        )
        self.version, self.step, self.trained_at_sync, self.stale_since_sync = -1, 0, 0, 0
        self.taken: list[int] = []
        self.loop = asyncio.new_event_loop()
        self.running = self.loop.create_task(self.dispatcher.run())
        self.settle()
        assert not self.in_flight, "started before the first weight sync"
        self.sync()

    @property
    def in_flight(self) -> list[tuple[MovedClient, int]]:
        return [(client, place) for client in self.clients for place in range(len(client.waiting))]

    def settle(self) -> None:
        """Let everything run that can."""

        async def turns() -> None:
            for _ in range(15):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())

    def sync(self) -> None:
        self.version += 1
        self.trained_at_sync, self.stale_since_sync = len(self.taken), 0
        self.budget.synced()
        self.settle()

    @precondition(lambda self: bool(self.in_flight))
    @rule(data=st.data())
    def finish_a_sample(self, data: st.DataObject) -> None:
        client, place = data.draw(st.sampled_from(self.in_flight))
        client.finish(place, self.version)
        self.settle()

    @precondition(lambda self: len(self.queue) > 0 and self.step < self.num_steps)
    @rule()
    def train_on_a_group(self) -> None:
        [group] = self.loop.run_until_complete(self.queue.take(1, 1.0))
        self.taken.append(group.instance.number)
        self.stale_since_sync += group.oldest_version < self.version
        self.settle()
        if len(self.taken) % self.per_step == 0:
            self.budget.trained(self.per_step)
            self.step += 1
            if self.step % self.sync_step == 0 or self.step == self.num_steps:
                self.sync()

    @precondition(lambda self: self.step == self.num_steps)
    @rule()
    def the_job_is_over(self) -> None:
        assert self.running.done()
        assert not self.in_flight

    @invariant()
    def bounds_hold(self) -> None:
        if not hasattr(self, "loop"):
            return
        assert self.budget.num_started <= self.trained_at_sync + self.limit
        assert self.stale_since_sync <= self.most_stale, "more stale samples than the threshold allows"
        assert all(len(client.waiting) <= self.room * _NUM_SAMPLES for client in self.clients)
        assert len(self.taken) == len(set(self.taken))
        if not self.in_flight and not len(self.queue):
            assert len(self.taken) == self.per_step * self.num_steps, "everybody waits for ever"

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        self.running.cancel()
        self.loop.run_until_complete(asyncio.gather(self.running, return_exceptions=True))
        self.loop.close()


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
