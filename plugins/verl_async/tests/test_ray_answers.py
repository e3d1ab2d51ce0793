"""Answers of several actors: who is blamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verl_async.asynchrony.waiting import within
from verl_async.ray.answers import answers
from verl_engine.contract.errors import StuckError

NAMES = ["trainer rank 0", "trainer rank 1", "trainer rank 2"]


def references(*done: bool) -> list[Any]:
    """Make futures in the place of Ray's references: answered, or silent for ever."""
    loop = asyncio.get_running_loop()
    made: list[asyncio.Future[int]] = [loop.create_future() for _ in done]
    for number, (future, answered) in enumerate(zip(made, done, strict=True)):
        if answered:
            future.set_result(number)
    return list(made)


def test_answers_come_in_order() -> None:
    async def main() -> list[int]:
        return await answers(references(True, True, True), NAMES)

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_time_limit_names_the_ranks_that_are_silent() -> None:
    async def main() -> None:
        await within(0.05, "the trainer did not finish a step", answers(references(True, False, False), NAMES))

    message = r"^the trainer did not finish a step within 0\.05 s \(no answer from trainer rank 1, trainer rank 2\)$"
    with pytest.raises(StuckError, match=message):
        asyncio.run(main())
