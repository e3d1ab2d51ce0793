"""Balanced division, by hand and by property."""

from __future__ import annotations

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
