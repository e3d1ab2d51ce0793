"""The bounded queue: back-pressure, and nothing lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.verl_async.tests.fakes import make_group
from verl_async.orchestrator.sample_queue import SampleQueue
from verl_engine.contract.errors import StuckError


def test_groups_leave_in_the_order_in_which_they_came() -> None:
    async def main() -> None:
        queue = SampleQueue(3)
        for number in range(3):
            await queue.put(make_group(number), 1.0)
        assert len(queue) == 3
        assert [group.instance.number for group in await queue.take(2, 1.0)] == [0, 1]
        assert [group.instance.number for group in await queue.take(1, 1.0)] == [2]
        assert len(queue) == 0

    asyncio.run(main())


def test_a_full_queue_makes_rollouts_wait() -> None:
    async def main() -> None:
        queue = SampleQueue(1)
        await queue.put(make_group(0), 1.0)
        putting = asyncio.ensure_future(queue.put(make_group(1), 1.0))
        await asyncio.sleep(0.02)
        assert not putting.done()
        assert [group.instance.number for group in await queue.take(1, 1.0)] == [0]
        await putting
        assert len(queue) == 1

    asyncio.run(main())


@settings(deadline=None)
@given(size=st.integers(1, 4), shares=st.lists(st.integers(0, 7), min_size=1, max_size=4), count=st.integers(1, 5))
def test_nothing_is_lost_however_small_the_queue(size: int, shares: list[int], count: int) -> None:
    """Several rollouts put, one trainer takes more at a time than the queue holds."""

    async def main() -> list[int]:
        queue = SampleQueue(size)

        async def put_all(first: int, number: int) -> None:
            for offset in range(number):
                await queue.put(make_group(first + offset), 1.0)
                assert len(queue) <= size

        putting = [asyncio.ensure_future(put_all(100 * place, share)) for place, share in enumerate(shares)]
        taken: list[int] = []
        while len(taken) < sum(shares):
            part = await queue.take(min(count, sum(shares) - len(taken)), 1.0)
            taken += [group.instance.number for group in part]
        await asyncio.gather(*putting)
        return taken

    taken = asyncio.run(main())
    assert sorted(taken) == [100 * place + offset for place, share in enumerate(shares) for offset in range(share)]
    for place in range(len(shares)):
        own = [number for number in taken if number // 100 == place]
        assert own == sorted(own)


def test_time_outs_say_who_is_stuck() -> None:
    async def main() -> None:
        queue = SampleQueue(1)
        await queue.put(make_group(0), 1.0)
        with pytest.raises(StuckError, match=r"queue is full \(1 groups\): the trainer took none within 0\.02 s"):
            await queue.put(make_group(1), 0.02)
        with pytest.raises(StuckError, match=r"has 1 of 2 groups: the rollout workers brought none within 0\.02 s"):
            await queue.take(2, 0.02)
        await queue.put(make_group(2), 0.02)  # the queue still works: its lock is free
        assert [group.instance.number for group in await queue.take(1, 0.02)] == [2]

    asyncio.run(main())


def test_the_clock_starts_anew_with_each_group() -> None:
    async def main() -> None:
        queue = SampleQueue(1)
        taking = asyncio.ensure_future(queue.take(4, 0.2))
        for number in range(4):
            await asyncio.sleep(0.1)
            await queue.put(make_group(number), 1.0)
        assert len(await taking) == 4

    asyncio.run(main())


@pytest.mark.parametrize("waits_to", ["put", "take"])
def test_a_cancelled_wait_leaves_the_queue_usable(waits_to: str) -> None:
    async def main() -> None:
        queue = SampleQueue(1)
        if waits_to == "put":
            await queue.put(make_group(0), 1.0)
        waiting = asyncio.ensure_future(queue.put(make_group(1), 9.0) if waits_to == "put" else queue.take(1, 9.0))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        if waits_to == "put":
            await queue.take(1, 1.0)
        await queue.put(make_group(2), 1.0)
        assert [group.instance.number for group in await queue.take(1, 1.0)] == [2]

    asyncio.run(main())
