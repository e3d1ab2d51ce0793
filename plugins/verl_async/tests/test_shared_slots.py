"""Two buffers in shared memory, and nothing left behind."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pytest

from verl_async.orchestrator.shared_slots import NUM_SLOTS, SharedSlots
from verl_engine.contract.errors import WeightsError

if TYPE_CHECKING:
    from verl_engine.testing.rank_pools import OnRanks


def test_what_one_side_writes_the_other_reads(tmp_path: Path) -> None:
    writer = SharedSlots.create(100, tmp_path)
    reader = SharedSlots(writer.paths)
    writer[0][:] = 7
    writer[1][:50] = 9
    assert reader[0].tolist() == [7] * 100
    assert reader[1].tolist() == [9] * 50 + [0] * 50
    assert reader[0].dtype == np.uint8
    assert reader[0].flags.writeable  # torch warns of memory that is not


def test_the_memory_outlives_its_name(tmp_path: Path) -> None:
    writer = SharedSlots.create(64, tmp_path)
    reader = SharedSlots(writer.paths)
    writer.unlink()
    assert list(tmp_path.iterdir()) == []
    writer[1][:] = 5
    assert reader[1].tolist() == [5] * 64
    writer.unlink()  # harmless when called twice


def test_pages_are_reserved_at_once(tmp_path: Path) -> None:
    slots = SharedSlots.create(2**20, tmp_path)
    assert [os.stat(path).st_blocks * 512 >= 2**20 for path in slots.paths] == [True] * NUM_SLOTS  # noqa: PTH116


def test_files_can_only_be_read_by_their_owner(tmp_path: Path) -> None:
    slots = SharedSlots.create(64, tmp_path)
    assert {Path(path).stat().st_mode & 0o077 for path in slots.paths} == {0}


def test_full_memory_is_one_clear_error_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def allocate(descriptor: int, offset: int, num_bytes: int) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.truncate(descriptor, offset + num_bytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    message = r"needs 2 buffers of 3\.0 MiB in .* MiB free \(No space left on device\); lower weight_sync\.bucket_bytes"
    with pytest.raises(WeightsError, match=message):
        SharedSlots.create(3 * 2**20, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_buffer_that_cannot_be_mapped_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(WeightsError, match=r"Cannot allocate memory"):
        SharedSlots.create(64, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_posix_fallocate_files_have_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "posix_fallocate")
    assert len(SharedSlots.create(64, tmp_path)[1]) == 64


def read_in_another_process(rank: int, paths: list[str]) -> int:
    assert rank == 0
    return int(SharedSlots(paths)[0].sum())


@pytest.mark.dist
def test_another_process_reads_without_a_copy(tmp_path: Path, on_ranks: OnRanks) -> None:
    slots = SharedSlots.create(10, tmp_path)
    slots[0][:] = 4
    assert on_ranks(read_in_another_process, slots.paths, world_size=1) == [40]
