"""Dividing numbers into groups of nearly equal sum."""

import heapq
from collections.abc import Sequence

_Entry = tuple[int, int, list[tuple[int, list[int]]]]
"""(-spread, tie-break, groups as (sum, indices), largest sum first)."""


def balance(weights: Sequence[int], num_groups: int) -> list[list[int]]:
    """Divide items into groups so that the sums of their weights differ little.

    Largest differencing: of the two partial divisions with the widest spread, the heaviest group of one is joined with
    the lightest of the other, until one division is left. Deterministic; groups may be empty.

    Args:
        weights: one non-negative number an item.
        num_groups: at least 1.
    Returns:
        `num_groups` lists of item indices, each sorted; every item is in exactly one.
    Source: Karmarkar & Karp 1982, "The differencing method of set partitioning".
    """
    heap: list[_Entry] = []
    for index, weight in enumerate(weights):
        groups = [(weight, [index])] + [(0, [])] * (num_groups - 1)
        heap.append((-weight if num_groups > 1 else 0, index, groups))
    if not heap:
        return [[] for _ in range(num_groups)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie_break, wide = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [
            (heavy + light, heavy_items + light_items)
            for (heavy, heavy_items), (light, light_items) in zip(wide, reversed(other), strict=True)
        ]
        joined.sort(key=lambda group: (-group[0], group[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], tie_break, joined))
    return [sorted(items) for _, items in heap[0][2]]
