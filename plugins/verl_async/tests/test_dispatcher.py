"""Which prompts start when and where, and how groups come into the queue."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_async.tests.fake_rollout import STOP, FakeRollout
from plugins.verl_async.tests.fakes import encoded_prompts, make_scorer
from verl_async.config import RolloutConfig
from verl_async.orchestrator.dispatcher import Dispatcher
from verl_async.orchestrator.prompt_source import PromptSource
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.sample_queue import SampleQueue
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.staleness import StalenessBudget
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.waiting import beside
from verl_async.orchestrator.workflow import SingleTurn
from verl_async.rollout.interface import SamplingParams
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from verl_async.orchestrator.samples import ScoredGroup
    from verl_async.rollout.interface import Generation, GenerationRequest


def dispatcher_of(
    *clients: FakeRollout,
    total: int = 3,
    queue_size: int = 9,
    timeout_s: float = 5.0,
    reward_of: Any = len,
    **config: Any,
) -> Dispatcher:
    """A dispatcher with leave to roll out everything at once."""
    budget = StalenessBudget(total, total)
    budget.synced()
    timeline = Timeline()
    return Dispatcher(
        workers=[RolloutWorker(client, timeline, timeout_s) for client in clients],
        source=PromptSource(encoded_prompts(5), seed=0, shuffle=False),
        budget=budget,
        queue=SampleQueue(queue_size),
        sampler=Sampler(SingleTurn(), make_scorer(reward_of, timeline=timeline), SamplingParams(8), 0),
        config=RolloutConfig(**{"n": 2, "timeout_s": timeout_s} | config),
        put_timeout_s=timeout_s,
    )


def run(dispatcher: Dispatcher, main: Coroutine[Any, Any, Any] | None = None) -> Any:
    """Dispatch everything, beside `main`."""

    async def everything() -> Any:
        main_too = main or asyncio.sleep(0)
        serving = (worker.serve() for worker in dispatcher.workers)
        return (await beside(_both(dispatcher.run(), main_too), *serving))[1]

    return asyncio.run(asyncio.wait_for(everything(), 10.0))


async def _both(*parts: Coroutine[Any, Any, Any]) -> Any:
    return await asyncio.gather(*parts)


def rows(client: FakeRollout) -> list[list[int]]:
    return [[request.prompt_ids[0] for request in call] for call in client.calls]


def test_every_prompt_is_answered_n_times() -> None:
    client = FakeRollout()
    dispatcher = dispatcher_of(client)
    groups = run(dispatcher, dispatcher.queue.take(3, 5.0))
    assert rows(client) == [[10], [10], [20], [20], [30], [30]]
    assert not any(client.sealed)
    for row, group in enumerate(sorted(groups, key=lambda group: group.instance.number)):
        assert [answer.token_ids for answer in group.trajectories] == [[10 * row + 11, 10 * row + 12, STOP]] * 2
        assert group.rewards == (5.0, 5.0)
        assert not group.is_partial


class Unequal(FakeRollout):
    """The first sample of prompt 10 is long, all others are short."""

    def length(self, request: GenerationRequest) -> int:
        first = min((one.seeds for [one] in self.calls[:2]), default=())
        return 8 if request.prompt_ids[0] == 10 and request.seeds == first else 2


def test_samples_are_scored_and_groups_queued_while_another_is_still_generated() -> None:
    client, scored = Unequal(token_s=0.01), list[str]()

    def score(text: str) -> float:
        scored.append(text)
        return 1.0

    dispatcher = dispatcher_of(client, reward_of=score)

    async def first_two() -> list[int]:
        groups = await dispatcher.queue.take(2, 5.0)
        assert client.generating
        assert len(scored) == 5, "a sample waits for the rest of its group"
        return [group.instance.number for group in groups]

    assert sorted(run(dispatcher, first_two())) == [1, 2]


def test_a_new_prompt_starts_as_soon_as_there_is_room() -> None:
    """Room for two prompts: one long sample takes the place of itself only."""
    client = Unequal(token_s=0.01)
    dispatcher = dispatcher_of(client, total=5, max_batch_prompts=2)
    run(dispatcher)
    assert client.most_running == 4
    assert len(dispatcher.queue) == 5


def test_the_worker_with_the_least_to_do_gets_the_next_prompt() -> None:
    slow, quick = FakeRollout(0, token_s=0.05), FakeRollout(1, token_s=0.001)
    dispatcher = dispatcher_of(slow, quick, total=8, max_batch_prompts=1)
    run(dispatcher)
    assert len(slow.calls) < len(quick.calls)
    assert all(len(calls) % 2 == 0 for calls in (slow.calls, quick.calls)), "a group is divided over workers"
    assert all(worker.num_started == 0 for worker in dispatcher.workers)


def test_nothing_starts_while_the_queue_is_full() -> None:
    client = FakeRollout()
    dispatcher = dispatcher_of(client, total=5, queue_size=1, max_batch_prompts=1)

    async def look() -> None:
        await asyncio.sleep(0.05)
        assert (len(dispatcher.queue), len(client.calls)) == (1, 4)  # one group more may wait to be put in
        await dispatcher.queue.take(5, 5.0)

    run(dispatcher, look())


def test_a_trainer_that_takes_nothing_is_named() -> None:
    with pytest.raises(StuckError, match="the trainer took none"):
        run(dispatcher_of(FakeRollout(), queue_size=1, timeout_s=0.2))


def test_a_sealed_batch_waits_for_its_slowest_and_goes_out_in_order() -> None:
    """Fixed batches: of 5 prompts and at most 2, whatever the number of workers."""
    clients = [FakeRollout(0), FakeRollout(1)]
    dispatcher = dispatcher_of(*clients, total=5, max_batch_prompts=2, deterministic=True)
    run(dispatcher)
    assert [rows(client) for client in clients] == [[[10, 10, 20, 20], [50, 50]], [[30, 30, 40, 40]]]
    assert all(all(client.sealed) for client in clients)


@pytest.mark.parametrize("seed", range(5))
def test_in_deterministic_mode_requests_do_not_depend_on_the_order_of_arrival(seed: int) -> None:
    class Shuffled(FakeRollout):
        async def draw(self, row: Generation, request: GenerationRequest) -> None:
            await asyncio.sleep(random.Random(f"{seed} {request.seeds}").random() / 100)
            await super().draw(row, request)

    def of(*clients: FakeRollout) -> tuple[list[list[tuple[int, ...]]], list[ScoredGroup]]:
        dispatcher = dispatcher_of(*clients, total=5, max_batch_prompts=2, deterministic=True)
        groups = run(dispatcher, dispatcher.queue.take(5, 5.0))
        calls = [[one.seeds for one in call] for client in clients for call in client.calls]
        return calls, sorted(groups, key=lambda group: group.instance.number)

    assert of(Shuffled(0), Shuffled(1)) == of(FakeRollout(0), FakeRollout(1))


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.004, 0.01, 0.02])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_cancelled_dispatcher_leaves_nothing_running(after_s: float, deterministic: bool) -> None:
    async def main() -> None:
        client = FakeRollout(token_s=0.001, num_tokens=5)
        dispatcher = dispatcher_of(client, queue_size=1, deterministic=deterministic)
        running = asyncio.ensure_future(dispatcher.run())
        await asyncio.sleep(after_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        await asyncio.gather(*client.tasks)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_it_ends_when_the_job_needs_no_more() -> None:
    dispatcher = dispatcher_of(FakeRollout(), total=0)
    run(dispatcher)
    assert len(dispatcher.queue) == 0
