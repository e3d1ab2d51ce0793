"""Batches go to every rank of a data-parallel rank, and the results of each come back once."""

from __future__ import annotations

from verl_async.orchestrator.data_parallel import DataParallelRanks


def test_each_rank_has_data_of_its_own() -> None:
    each = DataParallelRanks((0, 1, 2))
    assert each.count == 3
    assert each.to_ranks(["a", "b", "c"]) == ["a", "b", "c"]
    assert each.from_ranks([1, 2, 3]) == [1, 2, 3]


def test_ranks_that_split_sequences_get_the_same_batch_and_answer_once() -> None:
    neighbours = DataParallelRanks((0, 0, 1, 1))
    assert neighbours.count == 2
    assert neighbours.to_ranks(["a", "b"]) == ["a", "a", "b", "b"]
    assert neighbours.from_ranks([1, -1, 2, -2]) == [1, 2]


def test_ranks_with_the_same_data_need_not_be_neighbours() -> None:
    apart = DataParallelRanks((1, 0, 1, 0))
    assert apart.to_ranks(["a", "b"]) == ["b", "a", "b", "a"]
    assert apart.from_ranks([10, 20, 30, 40]) == [20, 10]
