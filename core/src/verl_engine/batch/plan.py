"""Which rank computes which sequence, in which micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.batch.balance import balance
from verl_engine.contract.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence


def plan_micro_batches(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Divide a global batch over data-parallel ranks and micro-batches, balanced by tokens.

    Every rank gets the same number of micro-batches, as few as the token budget allows; some may be empty where there
    are fewer sequences than places. A sequence longer than the budget gets a micro-batch of its own.

    Args:
        lengths: tokens of each sequence of the global batch, each at least 1.
        num_ranks: data-parallel ranks.
        max_tokens: budget of one micro-batch on one rank.
    Returns:
        ``plan[rank][micro_batch]`` is a list of sequence indices; every sequence is in exactly one.
    Raises:
        BatchError: a number is below 1.
    """
    if num_ranks < 1 or max_tokens < 1 or min(lengths, default=1) < 1:
        raise BatchError(f"num_ranks={num_ranks}, max_tokens={max_tokens} and every length must be at least 1")
    shares = balance(lengths, num_ranks)
    count = max(1, *(-(-sum(lengths[index] for index in share) // max_tokens) for share in shares))
    plan = _split(lengths, shares, count)
    # Balancing does not always reach the smallest count that fits, and every rank needs the same number.
    while not all(_keeps_budget(lengths, rank, max_tokens) for rank in plan):
        count += 1
        plan = _split(lengths, shares, count)
    return plan


def _split(lengths: Sequence[int], shares: list[list[int]], count: int) -> list[list[list[int]]]:
    """Split each rank's share into `count` balanced micro-batches."""
    return [
        [[share[item] for item in group] for group in balance([lengths[index] for index in share], count)]
        for share in shares
    ]


def _keeps_budget(lengths: Sequence[int], micro_batches: list[list[int]], max_tokens: int) -> bool:
    """Whether every micro-batch keeps to the budget or holds a single sequence."""
    return all(len(group) <= 1 or sum(lengths[index] for index in group) <= max_tokens for group in micro_batches)
