"""Ranks that stay for many calls."""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from verl_engine.testing.rank_pool import RankError, RankPool

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.dist


def own_process(rank: int) -> tuple[int, int]:
    return rank, os.getpid()


def hang_on_one(rank: int) -> None:
    if rank == 1:
        time.sleep(100)


def print_and_die(_rank: int) -> None:
    sys.stdout.write("the last words")
    sys.stdout.flush()
    os._exit(7)


def write_loaded(file: Path) -> None:
    file.write_text(str("torch" in sys.modules))


def test_the_same_processes_answer_every_call() -> None:
    pool = RankPool(2)
    first, second = pool.run(own_process), pool.run(own_process)
    pool.close()
    pool.close()
    assert first == second
    assert [rank for rank, _ in first] == [0, 1]
    assert pool.is_closed


def test_a_silent_rank_is_named_with_the_line_it_is_at() -> None:
    pool = RankPool(2)
    with pytest.raises(RankError, match=r"^no result from rank 1 of 2 within 3 s$") as caught:
        pool.run(hang_on_one, timeout_s=3.0)
    assert "in hang_on_one" in caught.value.details
    assert pool.is_closed


def test_what_a_dead_rank_wrote_is_shown() -> None:
    with pytest.raises(RankError) as caught:
        RankPool(1).run(print_and_die)
    assert caught.value.summary == "rank 0 of 1: the process died without a result (exit code 7)"
    assert "the last words" in caught.value.details


def test_ranks_prepare_before_torch_is_imported_where_they_must(tmp_path: Path) -> None:
    file = tmp_path / "loaded"
    pool = RankPool(1, prepare=partial(write_loaded, file), must_precede=("torch",))
    pool.run(own_process)
    pool.close()
    assert file.read_text() == "False"


def refuse_to_prepare() -> None:
    raise ValueError("not on this machine")


def test_a_failed_preparation_fails_the_first_call() -> None:
    with pytest.raises(RankError) as caught:
        RankPool(1, prepare=refuse_to_prepare).run(own_process)
    assert "not on this machine" in caught.value.summary
