"""Reward functions of the end-to-end tests; jobs name them as `tests.end_to_end_rewards.count_even`."""

from __future__ import annotations

import asyncio
import itertools
import os

from verl_engine.contract.strict_model import StrictModel

_calls = itertools.count(1)


def count_even(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:  # noqa: ARG001
    """Count even digits: an untrained model gets different rewards for different answers."""
    return float(sum(character in "02468" for character in solution_str))


class Judge:
    """An async reward with a setting; one of its calls hangs, and one beside that fails."""

    class Config(StrictModel):
        """Its settings."""

        bonus: float

    def __init__(self, config: Config) -> None:
        self.config = config
        self._calls = itertools.count(1)

    async def __call__(self, solution_str: str, **_: object) -> object:
        call = next(self._calls)
        await asyncio.sleep(60.0 if call == 9 else 0.01)
        return None if call == 10 else {"score": self.config.bonus * (call % 2), "length": len(solution_str)}


def fail_later(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Work for a while, then fail."""
    if next(_calls) > 40:  # after the trial before the start, and in more than the first step
        raise LookupError("the judge has left")
    return count_even(data_source, solution_str, ground_truth, extra_info)


def exit_later(data_source: str, solution_str: str, ground_truth: str, extra_info: object) -> float:
    """Work for a while, then end the process."""
    if next(_calls) > 40:
        os._exit(0)
    return count_even(data_source, solution_str, ground_truth, extra_info)
