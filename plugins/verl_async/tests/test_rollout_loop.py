"""One rollout worker's loop: draw, generate, score, queue."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from plugins.verl_async.tests.fakes import STOP, FakeRollout, encoded_prompts, make_scorer
from verl_async.config import RolloutConfig
from verl_async.orchestrator.actors import RolloutWorker
from verl_async.orchestrator.prompt_source import PromptSource
from verl_async.orchestrator.rollout_loop import RolloutLoop
from verl_async.orchestrator.sample_queue import SampleQueue
from verl_async.orchestrator.staleness import StalenessBudget
from verl_async.orchestrator.timeline import Timeline
from verl_async.rollout.interface import SamplingParams
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from verl_async.orchestrator.samples import ScoredGroup
    from verl_async.rollout.interface import Generation, GenerationRequest


def loop_of(
    client: FakeRollout, total: int = 3, at_most: int = 2, queue_size: int = 9, timeout_s: float = 5.0
) -> RolloutLoop:
    """A loop with leave to roll out everything at once."""
    budget = StalenessBudget(total, total)
    budget.synced()
    return RolloutLoop(
        worker=RolloutWorker(client),
        num_workers=1,
        source=PromptSource(encoded_prompts(5), seed=0, shuffle=False),
        budget=budget,
        queue=SampleQueue(queue_size),
        scorer=make_scorer(lambda text: float(len(text.split()))),
        timeline=Timeline(),
        config=RolloutConfig(n=2, max_batch_prompts=at_most, timeout_s=timeout_s),
        sampling=SamplingParams(8),
        put_timeout_s=timeout_s,
    )


async def run(loop: RolloutLoop, total: int = 3) -> list[ScoredGroup]:
    running = asyncio.ensure_future(loop.run())
    groups = await loop.queue.take(total, 5.0)
    await asyncio.wait_for(running, 5.0)
    return groups


def test_every_prompt_is_answered_n_times_in_batches() -> None:
    client = FakeRollout()
    loop = loop_of(client)
    groups = asyncio.run(run(loop))
    assert [[request.prompt_ids[0] for request in call] for call in client.calls] == [[10, 10, 20, 20], [30, 30]]
    assert [group.draw.number for group in groups] == [0, 1, 2]
    for row, group in enumerate(groups):
        assert [answer.token_ids for answer in group.generations] == [[10 * row + 11, 10 * row + 12, STOP]] * 2
        assert group.rewards == (2.0, 2.0)
        assert group.num_interruptions == 0
    assert {span.what for span in loop.timeline.spans} >= {"generate", "score"}
    assert {span.who for span in loop.timeline.spans} == {"rollouter-0"}


class Unequal(FakeRollout):
    """Prompt 10 gets short answers, all others long ones; tells when the third token was drawn."""

    def __init__(self) -> None:
        super().__init__(token_s=0.01)
        self.three_tokens = asyncio.Event()

    def after_token(self, rows: list[Generation]) -> None:
        if max(len(row.token_ids) for row in rows) == 3:
            self.three_tokens.set()

    def length(self, request: GenerationRequest) -> int:
        return 2 if request.prompt_ids[0] == 10 else 8


def test_interrupted_answers_go_on_with_their_tokens_under_the_new_weights() -> None:
    async def main() -> tuple[list[ScoredGroup], Unequal]:
        client = Unequal()
        loop = loop_of(client, total=2)
        running = asyncio.ensure_future(run(loop, total=2))
        await asyncio.wait_for(client.three_tokens.wait(), 5.0)  # prompt 10 is answered by now
        async with loop.worker.paused(interrupt=True):
            client.version = 1
        return await running, client

    (short, long), client = asyncio.run(main())
    first, second = client.calls
    assert len(first) == 4
    assert [request.prompt_ids[0] for request in second] == [20, 20], "finished answers are not generated again"
    assert short.num_interruptions == 0, "it was finished before the weights changed"
    assert long.num_interruptions == 1
    for answer, resumed in zip(long.generations, second, strict=True):
        assert len(resumed.so_far) == 1
        num_before = len(resumed.so_far[0].token_ids)
        assert 2 <= num_before < 8
        assert answer.token_ids == [21, 22, 23, 24, 25, 26, 27, STOP]
        assert answer.log_probs == [-1.0 - place for place in range(8)]
        assert answer.weight_versions == [0] * num_before + [1] * (8 - num_before)
    assert (long.oldest_version, long.newest_version) == (0, 1)
    assert [request.seeds for request in first[2:]] == [request.seeds for request in second]


def test_groups_are_queued_as_they_are_scored() -> None:
    """So that a slow reward function does not hold back the whole batch."""

    async def main() -> None:
        loop = loop_of(FakeRollout(), total=2, queue_size=1)
        running = asyncio.ensure_future(loop.run())
        assert len(await loop.queue.take(1, 5.0)) == 1
        assert len(await loop.queue.take(1, 5.0)) == 1
        await running

    asyncio.run(main())


def test_a_worker_that_does_not_answer_is_named() -> None:
    loop = loop_of(FakeRollout(4, token_s=100), timeout_s=0.01)
    with pytest.raises(StuckError, match=r"rollouter-4 did not finish generating 4 samples within 0\.01 s"):
        asyncio.run(loop.run())
    assert not loop.worker._lock.locked()


def test_a_trainer_that_takes_nothing_is_named() -> None:
    loop = loop_of(FakeRollout(), queue_size=1, timeout_s=0.2)
    with pytest.raises(StuckError, match="the trainer took none"):
        asyncio.run(loop.run())


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.004, 0.01, 0.02])
def test_a_cancelled_loop_frees_the_worker(after_s: float) -> None:
    async def main() -> None:
        loop = loop_of(FakeRollout(token_s=0.001, num_tokens=5), queue_size=1)
        running = asyncio.ensure_future(loop.run())
        await asyncio.sleep(after_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert not loop.worker._lock.locked()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_the_loop_ends_when_the_job_needs_no_more() -> None:
    loop = loop_of(FakeRollout(), total=0)
    asyncio.run(asyncio.wait_for(loop.run(), 5.0))
    assert len(loop.queue) == 0
