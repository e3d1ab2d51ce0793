"""The helper that runs a function on several ranks, and how it reports failures."""

from __future__ import annotations

import multiprocessing
import os
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from verl_engine.testing.ranks import RankError, run_ranks

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.dist


def sum_over_ranks(rank: int, start: float) -> tuple[int, torch.Tensor]:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return rank, value


def test_results_come_in_rank_order_tensors_included() -> None:
    results = run_ranks(sum_over_ranks, 10.0, world_size=3)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert [value.tolist() for _, value in results] == [[33.0]] * 3


def one_thread(rank: int) -> tuple[int, str, int]:
    return torch.get_num_threads(), os.environ["WORLD_SIZE"], int(torch.randint(1000, ()).item()) + rank


def test_each_rank_has_one_thread_and_the_same_seed() -> None:
    first, second = run_ranks(one_thread)
    assert first[:2] == second[:2] == (1, "2")
    assert second[2] == first[2] + 1


def big(rank: int) -> torch.Tensor:
    return torch.full((500_000,), float(rank))


def test_results_may_be_larger_than_a_pipe() -> None:
    assert [result.sum().item() for result in run_ranks(big)] == [0.0, 500_000.0]


def fail_on_one(rank: int) -> None:
    """Rank 1 fails; rank 0 then learns only that its peer is gone."""
    if rank == 1:
        raise ValueError("the cause")
    dist.all_reduce(torch.ones(1))


def test_the_earliest_failure_is_reported() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 2 failed first:.*ValueError: the cause"):
        run_ranks(fail_on_one)


def fail_late_and_early(rank: int) -> None:
    time.sleep(0.0 if rank else 0.5)
    raise ValueError(f"failure of rank {rank}")


def test_not_that_of_the_lowest_rank() -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 of 2 .*failure of rank 1"):
        run_ranks(fail_late_and_early)


def die_on_one(rank: int) -> None:
    if rank == 1:
        os.abort()
    dist.all_reduce(torch.ones(1))


def test_a_dead_process_is_named_with_where_it_was_and_not_the_one_that_misses_it() -> None:
    text = r"(?s)^rank 1 of 2 failed first:\nthe process died without a result \(exit code -6\).*in die_on_one"
    with pytest.raises(RankError, match=text):
        run_ranks(die_on_one)


def fail_before_a_death(rank: int) -> None:
    """As a peer that notices a death sooner than the one who started both."""
    if rank == 1:
        time.sleep(0.5)
        os._exit(3)
    raise ConnectionError("my peer is gone")


def test_a_dead_process_comes_before_an_error_that_was_reported_sooner() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed first:\nthe process died without a result"):
        run_ranks(fail_before_a_death)


def hang_on(rank: int, *silent: int) -> None:
    if rank in silent:
        time.sleep(100)


def test_a_time_out_names_all_who_are_silent() -> None:
    before = set(multiprocessing.active_children())  # ranks that stay for other tests
    with pytest.raises(RankError, match=r"^no result from ranks 0, 2 of 3 within 4 s$"):
        run_ranks(hang_on, 0, 2, world_size=3, timeout_s=4.0)
    assert set(multiprocessing.active_children()) <= before


def exit_with_code(rank: int) -> None:
    if rank == 0:
        raise SystemExit(4)


def test_an_exit_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 of 2 failed first.*SystemExit: 4"):
        run_ranks(exit_with_code)


def give_what_cannot_be_pickled(rank: int) -> object:
    return lambda: rank


def test_a_result_that_cannot_travel_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"(?s)failed first.*pickle"):
        run_ranks(give_what_cannot_be_pickled, world_size=1)


def write_rank(rank: int, folder: Path) -> None:
    (folder / str(rank)).write_text("done")


def test_arguments_travel(tmp_path: Path) -> None:
    assert run_ranks(write_rank, tmp_path) == [None, None]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
