"""Balanced division, by hand and by property."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from verl_engine.batch.balance import balance
from verl_engine.batch.plan import plan_micro_batches


def test_example_worked_by_hand() -> None:
    # 8, 7, 6, 5, 4: differencing joins 8|7 -> 1, 6|5 -> 1, then 4|1 -> 3, 3|1 -> 2: sums 16 and 14.
    groups = balance([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][item] for item in group) for group in groups) == [14, 16]


def test_more_groups_than_items_leaves_some_empty() -> None:
    assert sorted(balance([3, 5], 4)) == [[], [], [0], [1]]


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 8))
def test_each_item_is_in_exactly_one_group(weights: list[int], num_groups: int) -> None:
    groups = balance(weights, num_groups)
    assert len(groups) == num_groups
    assert sorted(item for group in groups for item in group) == list(range(len(weights)))


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=60), st.integers(2, 8))
def test_never_worse_than_the_largest_item(weights: list[int], num_groups: int) -> None:
    sums = [sum(weights[item] for item in group) for group in balance(weights, num_groups)]
    assert max(sums) - min(sums) <= max(weights)


@given(st.lists(st.integers(1, 300), max_size=50), st.integers(1, 4), st.integers(1, 500))
def test_plan_holds_every_sequence_once_within_the_budget(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    plan = plan_micro_batches(lengths, num_ranks, max_tokens)
    assert len(plan) == num_ranks
    assert len({len(rank) for rank in plan}) == 1
    groups = [group for rank in plan for group in rank]
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert all(len(group) <= 1 or sum(lengths[index] for index in group) <= max_tokens for group in groups)


def test_plan_worked_by_hand() -> None:
    # 12 tokens a rank with a budget of 6: two micro-batches each, all full.
    plan = plan_micro_batches([6, 6, 4, 2, 3, 3], num_ranks=2, max_tokens=6)
    assert [[sum([6, 6, 4, 2, 3, 3][i] for i in group) for group in rank] for rank in plan] == [[6, 6], [6, 6]]


def test_a_budget_below_every_length_needs_no_more_micro_batches_than_sequences() -> None:
    assert sorted(plan_micro_batches([9, 8, 7], num_ranks=1, max_tokens=2)[0]) == [[0], [1], [2]]
    # The long one fills one micro-batch, not ten; the short ones share the other.
    assert sorted(plan_micro_batches([1000, 10, 10], num_ranks=1, max_tokens=100)[0]) == [[0], [1, 2]]


def test_filling_where_balancing_finds_no_division() -> None:
    # 15 tokens fill three micro-batches of 6 at the least, but 4 and 3 fit with none but a 2: four are needed.
    plan = plan_micro_batches([4, 4, 4, 3], num_ranks=1, max_tokens=6)
    assert sorted(plan[0]) == [[0], [1], [2], [3]]
    assert [len(rank) for rank in plan_micro_batches([4, 4, 4, 3, 6], num_ranks=2, max_tokens=6)] == [3, 3]


def test_long_sequences_are_planned_in_no_time() -> None:
    started = time.monotonic()
    assert len(plan_micro_batches([4100] * 512, num_ranks=1, max_tokens=8192)[0]) == 512
    assert time.monotonic() - started < 5  # trying one count after the other took twenty
