"""Which rank computes which sequence, in which micro-batch."""

from bisect import bisect_left, insort
from collections.abc import Sequence

from verl_engine.batch.balance import balance
from verl_engine.contract.errors import BatchError


def plan_micro_batches(lengths: Sequence[int], num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Divide a global batch over data-parallel ranks and micro-batches, balanced by tokens.

    Every rank gets the same number of micro-batches, as few as the token budget allows or nearly so; some may be empty
    where a rank needs fewer than another. A sequence longer than the budget gets a micro-batch of its own.

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
    shards = balance(lengths, num_ranks)
    # Fewer cannot do: what is longer than the budget fills one micro-batch, and no more.
    least = max(-(-sum(min(lengths[index], max_tokens) for index in shard) // max_tokens) for shard in shards)
    plan = _split(lengths, shards, max(1, least))
    if all(_keeps_budget(lengths, rank, max_tokens) for rank in plan):
        return plan
    # Where sequences are long beside the budget, balancing takes many more: filling tells how many surely do.
    filled = [_fill(lengths, shard, max_tokens) for shard in shards]
    count = max(map(len, filled))
    return [
        balanced if _keeps_budget(lengths, balanced, max_tokens) else full + [[] for _ in range(count - len(full))]
        for balanced, full in zip(_split(lengths, shards, count), filled, strict=True)
    ]


def _split(lengths: Sequence[int], shards: list[list[int]], count: int) -> list[list[list[int]]]:
    return [
        [[shard[item] for item in group] for group in balance([lengths[index] for index in shard], count)]
        for shard in shards
    ]


def _fill(lengths: Sequence[int], shard: list[int], max_tokens: int) -> list[list[int]]:
    """Fill micro-batches up to the budget: each sequence, the longest first, goes where it leaves the least room.

    Source: Johnson et al. 1974, "Worst-case performance bounds for simple one-dimensional packing algorithms" (best fit
        decreasing): at most 11/9 of the smallest number, and one more.
    """
    groups: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, index in groups), ascending
    for index in sorted(shard, key=lambda index: (-lengths[index], index)):
        fit = bisect_left(rooms, (lengths[index], 0))
        if fit < len(rooms):
            room, at = rooms.pop(fit)
        else:
            room, at = max_tokens, len(groups)
            groups.append([])
        groups[at].append(index)
        insort(rooms, (room - lengths[index], at))
    return [sorted(group) for group in groups]


def _keeps_budget(lengths: Sequence[int], micro_batches: list[list[int]], max_tokens: int) -> bool:
    return all(len(group) <= 1 or sum(lengths[index] for index in group) <= max_tokens for group in micro_batches)
