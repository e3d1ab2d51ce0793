"""The order in which rows are drawn."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_async.data.order import EpochOrder, Mix, MixedOrder

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


weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=4)


@given(weights, st.lists(num_rows, min_size=4, max_size=4), st.booleans(), seeds)
def test_files_are_drawn_by_their_weights_and_each_in_whole_passes(
    weights: list[float], sizes: list[int], shuffle: bool, seed: int
) -> None:
    sizes = sizes[: len(weights)]
    order = MixedOrder(sizes, weights, shuffle, seed)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    drawn: list[list[int]] = [[] for _ in sizes]
    row = -1
    for number in range(1, 100):
        row = next(order)
        assert order.position == number
        index = max(index for index, start in enumerate(starts) if start <= row)
        drawn[index].append(row - starts[index])
        for rows, weight in zip(drawn, weights, strict=True):
            assert abs(len(rows) - number * weight / sum(weights)) < len(weights)
    for rows, size in zip(drawn, sizes, strict=True):
        whole = len(rows) // size * size
        assert all(sorted(rows[start : start + size]) == list(range(size)) for start in range(0, whole, size))
    again = MixedOrder(sizes, weights, shuffle, seed)
    assert [next(again) for _ in range(99)][-1] == row


@given(weights, st.lists(num_rows, min_size=4, max_size=4))
def test_an_epoch_of_a_mix_draws_every_row(weights: list[float], sizes: list[int]) -> None:
    mix = Mix(tuple(sizes[: len(weights)]), tuple(weights))
    assert mix.epoch >= sum(mix.sizes)
    if mix.epoch < 5000:
        order = mix.order(shuffle=True, seed=0)
        # The rarest file's last row may come a few draws late, as files take turns.
        drawn = {next(order) for _ in range(mix.epoch + 2 * len(weights))}
        assert drawn == set(range(sum(mix.sizes)))


def test_a_mix_worked_by_hand() -> None:
    mix = Mix((2, 3), (3.0, 1.0))
    assert list(islice(mix.order(shuffle=False, seed=0), 8)) == [0, 1, 2, 0, 1, 0, 3, 1]
    assert mix.epoch == 12  # three rows of the second file, which is every fourth draw
    assert Mix((2, 3)).epoch == 5
    assert list(islice(Mix((2, 3)).order(shuffle=True, seed=7), 9)) == list(islice(EpochOrder(5, True, 7), 9))


def test_files_of_a_mix_have_orders_of_their_own() -> None:
    drawn = list(islice(Mix((20, 20), (1.0, 1.0)).order(shuffle=True, seed=0), 40))
    assert [row for row in drawn if row < 20] != [row - 20 for row in drawn if row >= 20]
