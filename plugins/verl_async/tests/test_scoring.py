"""From tokens to rewards."""

from __future__ import annotations

import asyncio
import threading
from typing import NoReturn

import pytest

from plugins.verl_async.tests.fakes import STOP, encoded_prompts, make_scorer
from verl_async.asynchrony.samples import Draw
from verl_async.errors import RewardError
from verl_async.rollout.interface import Generation

DRAW = Draw(4, encoded_prompts(1)[0])
RIGHT = Generation([11, 12, STOP], [-1.0] * 3, [0] * 3, "stop")
WRONG = Generation([11], [-1.0], [0], "length")


def test_each_sample_gets_its_reward_and_whether_it_is_exact() -> None:
    group = asyncio.run(make_scorer(lambda text: 0.5 * len(text)).score(DRAW, [RIGHT, WRONG], 2))
    assert group.draw is DRAW
    assert group.generations == (RIGHT, WRONG)
    assert group.rewards == (2.5, 1.0)  # "11 12" without the closing token, and "11"
    assert group.exact == (True, False)
    assert group.num_interruptions == 2


def test_the_event_loop_goes_on_while_a_function_takes_its_time() -> None:
    async def main() -> None:
        go_on = threading.Event()
        scoring = asyncio.ensure_future(make_scorer(lambda _: float(go_on.wait(5.0))).score(DRAW, [RIGHT]))
        await asyncio.sleep(0.02)
        assert not scoring.done()
        go_on.set()
        assert (await scoring).rewards == (1.0,)

    asyncio.run(main())


def test_a_failing_function_names_the_sample() -> None:
    def fail(text: str) -> NoReturn:
        raise KeyError(text)

    with pytest.raises(RewardError, match=r"sample 4-0 \(prompt row 0\) raised KeyError"):
        asyncio.run(make_scorer(fail).score(DRAW, [RIGHT, WRONG]))


def test_a_cancelled_scoring_holds_nothing_up() -> None:
    go_on, called = threading.Event(), []

    async def main() -> None:
        def wait(text: str) -> float:
            called.append(text)
            return float(go_on.wait(5.0))

        scoring = asyncio.ensure_future(make_scorer(wait).score(DRAW, [RIGHT, WRONG]))
        await asyncio.sleep(0.02)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring

    asyncio.run(main())  # also waits for the threads of its own executor
    assert called == ["11 12"]
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "scoring of 4":
            thread.join(5.0)
    assert called == ["11 12"]  # the rest of the group is left alone
