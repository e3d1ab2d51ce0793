"""Waits with a limit: who is named, and that nothing is left running."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from verl_async.orchestrator.waiting import TimeLimit, end, together, within
from verl_engine.contract.errors import StuckError, WeightsError


async def give(value: int, after_s: float = 0.0) -> int:
    await asyncio.sleep(after_s)
    return value


async def fail(error: Exception, after_s: float = 0.0) -> NoReturn:
    await asyncio.sleep(after_s)
    raise error


class Patient:
    """Waits for ever, and notes that it was cancelled."""

    def __init__(self) -> None:
        self.ended = False

    async def wait(self) -> int:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.01)  # cleaning up takes a moment
            self.ended = True
        return 0


def test_what_comes_in_time_is_returned() -> None:
    assert asyncio.run(within(1.0, "nobody", give(3))) == 3


def test_the_error_names_who_did_not_answer_and_nothing_is_left_running() -> None:
    patient = Patient()

    async def main() -> None:
        with pytest.raises(StuckError, match=r"^rollouter-1 did not answer within 0\.05 s$"):
            await within(0.05, "rollouter-1 did not answer", patient.wait())
        assert patient.ended

    asyncio.run(main())


@pytest.mark.parametrize("error", [TimeoutError("a socket's"), StuckError("rollouter-0 did not start within 3 s")])
def test_a_time_out_of_what_is_awaited_keeps_its_own_words(error: Exception) -> None:
    with pytest.raises(type(error)) as caught:
        asyncio.run(within(1.0, "the trainer did not answer", fail(error)))
    assert caught.value is error


def test_a_cancelled_wait_ends_what_it_waits_for() -> None:
    patient = Patient()

    async def main() -> None:
        task = asyncio.ensure_future(within(10.0, "nobody", patient.wait()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert patient.ended

    asyncio.run(main())


def test_a_cancellation_is_not_lost_when_the_result_comes_at_the_same_moment() -> None:
    """asyncio.wait_for loses it before Python 3.12; a rollout loop that goes on would never end."""

    async def main() -> None:
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(within(10.0, "nobody", result))
        await asyncio.sleep(0)
        result.set_result(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_several_waits_share_one_limit() -> None:
    async def main() -> None:
        limit = TimeLimit(0.5)
        assert await limit.within("the first", give(1, after_s=0.3)) == 1
        with pytest.raises(StuckError, match=r"the second did not come within 0\.5 s"):
            await limit.within("the second did not come", give(2, after_s=0.3))

    asyncio.run(main())


def test_together_keeps_the_order() -> None:
    assert asyncio.run(together(give(1, after_s=0.02), give(2), give(3, after_s=0.01))) == [1, 2, 3]
    assert asyncio.run(together()) == []


def test_the_first_failure_ends_the_others_before_it_is_raised() -> None:
    patient = Patient()

    async def main() -> None:
        with pytest.raises(WeightsError, match="first"):
            await together(patient.wait(), fail(WeightsError("second"), 0.05), fail(WeightsError("first"), 0.01))
        assert patient.ended
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


def test_end_takes_tasks_in_any_state(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        tasks = [asyncio.ensure_future(fail(WeightsError("unseen"))), asyncio.ensure_future(give(1))]
        await asyncio.sleep(0.01)
        running = asyncio.ensure_future(give(2, after_s=100))
        await end(*tasks, running)
        assert running.cancelled()

    asyncio.run(main())
    assert caplog.text == ""  # no "exception was never retrieved"
