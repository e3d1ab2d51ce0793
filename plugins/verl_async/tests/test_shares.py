"""Batches go to every rank of their share, and each share's results come back once."""

from __future__ import annotations

from verl_async.orchestrator.shares import Shares


def test_each_rank_has_a_share_of_its_own() -> None:
    shares = Shares((0, 1, 2))
    assert shares.count == 3
    assert shares.to_ranks(["a", "b", "c"]) == ["a", "b", "c"]
    assert shares.from_ranks([1, 2, 3]) == [1, 2, 3]


def test_ranks_that_split_sequences_get_the_same_batch_and_answer_once() -> None:
    neighbours = Shares((0, 0, 1, 1))
    assert neighbours.count == 2
    assert neighbours.to_ranks(["a", "b"]) == ["a", "a", "b", "b"]
    assert neighbours.from_ranks([1, -1, 2, -2]) == [1, 2]


def test_ranks_of_a_share_need_not_be_neighbours() -> None:
    apart = Shares((1, 0, 1, 0))
    assert apart.to_ranks(["a", "b"]) == ["b", "a", "b", "a"]
    assert apart.from_ranks([10, 20, 30, 40]) == [20, 10]
