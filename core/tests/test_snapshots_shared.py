"""Snapshots that another process maps: equal, never torn, and nothing stays behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from core.tests.snapshot_engine import change, make_engine, make_snapshots, same, values
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.snapshots.checksum import weights_checksum
from verl_engine.engine.snapshots.shared import SharedSlot, SnapshotReader
from verl_engine.engine.snapshots.shared_file import SharedFile, remove_stale_files
from verl_engine.engine.weights.bucket import WeightBucket

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_engine.engine.snapshots.manager import Snapshots

READ = """
import pickle, sys
from verl_engine.engine.snapshots.shared import SnapshotReader
content = SnapshotReader(pickle.load(sys.stdin.buffer)).newest()
print(content.version, content.number, content.checksum(), content.tensors["logits"].sum().item())
"""
OWN = """
import sys, torch
from pathlib import Path
from verl_engine.engine.snapshots.shared import SharedSlot
from verl_engine.engine.weights.bucket import WeightBucket
slot = SharedSlot(WeightBucket.of({"a": torch.ones(4)}), Path(sys.argv[1]))
"""


@pytest.fixture
def snapshots() -> Iterator[Snapshots]:
    snapshots = make_snapshots(make_engine(), memory="shared")
    yield snapshots
    snapshots.close()


def slot_of(snapshots: Snapshots, tag: str) -> Path:
    return Path(snapshots.handle(tag).path)


def start(program: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.dist
def test_another_process_reads_what_was_saved(snapshots: Snapshots) -> None:
    saved = snapshots.save("kept", version=7)
    handle = pickle.dumps(snapshots.handle("kept"))
    for version in (7, 8):
        found = subprocess.run([sys.executable, "-c", READ], input=handle, capture_output=True, check=True).stdout
        assert found.split() == [
            str(part).encode() for part in (version, version - 6, saved.checksum, saved.tensors["logits"].sum().item())
        ]
        change(snapshots._engine, 3.0)  # type: ignore[arg-type] # the small engine
        saved = snapshots.save("kept", version=8)


def test_a_reader_follows_later_saves_and_knows_when_its_content_was_overwritten(snapshots: Snapshots) -> None:
    engine = snapshots._engine
    snapshots.save("kept", version=1)
    reader = SnapshotReader(snapshots.handle("kept"))
    first = reader.newest()
    before = {name: tensor.clone() for name, tensor in first.tensors.items()}
    change(engine, 2.0)  # type: ignore[arg-type]
    snapshots.save("kept", version=2)
    assert first.is_intact()
    assert same(first.tensors, before)
    second = reader.newest()
    assert (second.number, second.version) == (2, 2)
    assert (second.tensors["logits"] == 2).all()
    change(engine, 3.0)  # type: ignore[arg-type]
    snapshots.save("kept", version=3)
    assert second.is_intact()
    assert not first.is_intact()
    with pytest.raises(WeightsError, match="overwritten while it was read"):
        first.checksum()


def test_a_skipped_save_gives_readers_the_new_version(snapshots: Snapshots) -> None:
    snapshots.save("kept", version=1)
    reader = SnapshotReader(snapshots.handle("kept"))
    snapshots.save("kept", version=2)
    assert (reader.newest().number, reader.newest().version) == (1, 2)


def test_the_content_before_a_failed_save_stays_for_owner_and_readers(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = snapshots._engine
    before = values(engine)  # type: ignore[arg-type]
    snapshots.save("kept", version=1)
    reader = SnapshotReader(snapshots.handle("kept"))
    change(engine, 2.0)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            snapshots.save("kept", version=2)
    assert reader.newest().version == 1
    assert same(reader.newest().tensors, before)
    snapshots.restore("kept")
    assert same(values(engine), before)  # type: ignore[arg-type]


def test_a_handle_is_of_no_use_for_the_tag_that_takes_the_memory_over(snapshots: Snapshots) -> None:
    snapshots.save("first")
    old = snapshots.handle("first")
    reader = SnapshotReader(old)
    content = reader.newest()
    snapshots.drop("first")
    snapshots.save("second")
    assert snapshots.handle("second").path == old.path
    assert not content.is_intact()
    with pytest.raises(WeightsError, match="the shared snapshot 'first' is gone"):
        reader.newest()
    with pytest.raises(WeightsError, match="the shared snapshot 'first' is gone"):
        SnapshotReader(old).newest()
    assert SnapshotReader(snapshots.handle("second")).newest().number == 1


def test_a_reader_changes_only_what_it_sees_itself(snapshots: Snapshots) -> None:
    saved = snapshots.save("kept")
    reader = SnapshotReader(snapshots.handle("kept"))
    reader.newest().tensors["logits"].zero_()
    assert saved.tensors["logits"].sum() == 780
    assert SnapshotReader(snapshots.handle("kept")).newest().checksum() == saved.checksum


def test_private_snapshots_have_no_handle() -> None:
    snapshots = make_snapshots(make_engine())
    snapshots.save("kept")
    with pytest.raises(WeightsError, match=r"not in shared memory; set engine\.snapshot_memory=shared"):
        snapshots.handle("kept")


def test_the_second_half_takes_memory_only_when_a_tag_is_saved_again(snapshots: Snapshots) -> None:
    snapshots.save("kept")
    assert snapshots.held_bytes == 2 * 4096  # a page for the header, one for the weights
    for value in (1.0, 2.0):
        change(snapshots._engine, value)  # type: ignore[arg-type]
        snapshots.save("kept")
        assert snapshots.held_bytes == 3 * 4096


def test_a_limit_counts_the_second_half() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine, memory="shared", limit_bytes=10_000)
    snapshots.save("kept")
    before = values(engine)
    change(engine, 1.0)
    with pytest.raises(WeightsError, match=r"no room for tag 'kept', which takes 4.00 KiB; held are: tag 'kept' 8.00"):
        snapshots.save("kept")
    snapshots.restore("kept")
    assert same(values(engine), before)
    snapshots.close()


def test_what_swapped_keeps_is_nobody_elses_business(snapshots: Snapshots) -> None:
    snapshots.save("kept")
    held = snapshots.held_bytes
    with snapshots.swapped("kept"):
        assert snapshots.held_bytes == held + 384  # private: no pages, no header


def test_a_reader_never_sees_a_torn_snapshot(tmp_path: Path) -> None:
    """The owner writes without pause; what a reader finds intact after reading is all of one save."""
    layout = WeightBucket.of({str(index): torch.zeros(20_000) for index in range(4)})
    slot = SharedSlot(layout, tmp_path)
    is_done = threading.Event()

    def write() -> None:
        value = 0
        while not is_done.is_set():
            value += 1
            for tensor in slot.begin().values():
                tensor.fill_(value)
            slot.commit(value)

    slot.begin()
    slot.commit(0)
    reader = SnapshotReader(slot.handle("kept"))
    writer = threading.Thread(target=write)
    writer.start()
    num_intact = 0
    try:
        for _ in range(2000):
            content = reader.newest()
            found = {float(tensor[place]) for tensor in content.tensors.values() for place in (0, 10_000, -1)}
            if content.is_intact():
                num_intact += 1
                assert found == {content.version}
    finally:
        is_done.set()
        writer.join()
    assert num_intact > 0
    slot.close()


def test_a_file_goes_with_its_slot(tmp_path: Path) -> None:
    slot = SharedSlot(WeightBucket.of({"a": torch.ones(4)}), tmp_path)
    slot.begin()["a"].fill_(2)
    slot.commit(1)
    content = SnapshotReader(slot.handle("kept")).newest()
    assert len(list(tmp_path.iterdir())) == 1
    slot.close()
    slot.close()
    assert not list(tmp_path.iterdir())
    assert not content.is_intact()
    assert weights_checksum(content.tensors) == weights_checksum({"a": torch.full((4,), 2.0)})  # mapped, so still there


@pytest.mark.dist
def test_a_process_that_ends_leaves_nothing_behind_nor_does_its_fork(tmp_path: Path) -> None:
    fork = (
        OWN + "import os\nchild = os.fork()\nif not child: sys.exit()\nos.waitpid(child, 0)\n"
        "print(slot._file.path.exists())"
    )
    process = start(fork, tmp_path)
    assert process.communicate(timeout=120)[0] == "True\n"
    assert process.returncode == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.dist
def test_what_a_killed_process_left_is_removed_by_the_next_and_a_living_ones_is_not(tmp_path: Path) -> None:
    process = start(OWN + "print(slot._file.path, flush=True)\nsys.stdin.read()", tmp_path)
    assert process.stdout is not None
    path = Path(process.stdout.readline().strip())
    remove_stale_files(tmp_path)
    assert path.exists()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert path.exists()
    own = SharedFile(4096, tmp_path)
    assert list(tmp_path.iterdir()) == [own.path]
    own.close()


def test_a_full_folder_is_refused_and_left_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(
        WeightsError, match=r"a shared snapshot needs 0\.00 GiB in .*No space left on device\); drop a tag"
    ):
        SharedSlot(WeightBucket.of({"a": torch.ones(4)}), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"cannot make a file for shared snapshots in .*missing"):
        SharedFile(4096, tmp_path / "missing")


def test_readers_of_a_process_that_is_gone_are_told(snapshots: Snapshots) -> None:
    snapshots.save("kept")
    handle = snapshots.handle("kept")
    snapshots.close()
    with pytest.raises(WeightsError, match=r"the shared snapshot 'kept' is gone .*No such file"):
        SnapshotReader(handle)
