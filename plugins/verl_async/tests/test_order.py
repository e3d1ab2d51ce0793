"""The order in which rows are drawn."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_async.data.order import EpochOrder

num_rows = st.integers(1, 40)
seeds = st.integers(0, 2**40)


@given(num_rows, st.booleans(), seeds)
def test_each_epoch_visits_each_row_once(rows: int, shuffle: bool, seed: int) -> None:
    order = EpochOrder(rows, shuffle, seed)
    for epoch in range(3):
        assert sorted(islice(order, rows)) == list(range(rows))
        assert order.position == (epoch + 1) * rows


@given(num_rows, st.booleans(), seeds, st.integers(0, 130))
def test_an_order_rebuilt_at_a_position_goes_on_as_the_first(
    rows: int, shuffle: bool, seed: int, position: int
) -> None:
    first = EpochOrder(rows, shuffle, seed)
    drawn = list(islice(first, position))
    assert len(drawn) == first.position == position
    again = EpochOrder(rows, shuffle, seed, position)
    assert list(islice(again, 60)) == list(islice(first, 60))


def test_without_shuffling_rows_come_as_they_stand() -> None:
    assert list(islice(EpochOrder(3, shuffle=False, seed=5), 7)) == [0, 1, 2, 0, 1, 2, 0]


def test_epochs_and_seeds_differ() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return list(islice(EpochOrder(50, shuffle=True, seed=seed, position=50 * number), 50))

    orders = [epoch(0, 0), epoch(0, 1), epoch(1, 0), epoch(1, 1)]
    assert all(one != other for place, one in enumerate(orders) for other in orders[:place])
    assert list(range(50)) not in orders


def test_the_order_is_the_same_on_every_machine() -> None:
    # As NumPy 2.4 gave it. Should another version differ, then resumed jobs would see other prompts.
    assert list(islice(EpochOrder(6, shuffle=True, seed=0), 12)) == [0, 3, 5, 1, 2, 4, 3, 4, 2, 1, 5, 0]


@pytest.mark.parametrize(("rows", "seed", "position"), [(0, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_numbers_out_of_range(rows: int, seed: int, position: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        EpochOrder(rows, shuffle=True, seed=seed, position=position)
