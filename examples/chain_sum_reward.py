"""A reward function of one's own: the recipe names it as `chain_sum_reward.score`."""

from __future__ import annotations

import re


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]) -> float:  # noqa: ARG001
    """Score an answer: 1 if its last number is the sum, 0.1 if there is another number, 0 without any.

    The small part tells a model that explains too much from one that says nothing; without it almost every group of
    answers of a small model has equal rewards, and teaches nothing.

    Args:
        data_source: which task the prompt is from.
        solution_str: the model's answer.
        ground_truth: the sum.
        extra_info: the prompt's own column of that name.
    """
    numbers = re.findall(r"-?\d+", solution_str)
    if not numbers:
        return 0.0
    return 1.0 if int(numbers[-1]) == int(ground_truth) else 0.1
