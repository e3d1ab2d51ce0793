"""One process: when a checkpoint is there, and what a failure leaves. Ranks are in test_checkpoint_ranks."""

from __future__ import annotations

import errno
import resource
import shutil
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

from core.tests.test_module_engine import PlainEngine, make, set_gradients, weights
from verl_engine.contract.errors import ConfigError, StuckError, WeightsError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.checkpoints.writer import CheckpointWriter, StagingMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WRITE = CheckpointWriter.write


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(tmp_path / "checkpoints")
    yield store
    store.close()


def step(engine: PlainEngine, value: float = 1.0) -> None:
    set_gradients(engine, value)
    engine.optimizer_step()


def trained(num_steps: int = 2, **settings: Any) -> PlainEngine:
    engine = make(warmup_steps=5, **settings)
    for number in range(num_steps):
        step(engine, number + 1.0)
    return engine


def same(first: PlainEngine, second: PlainEngine) -> bool:
    pairs = zip(weights(first).values(), weights(second).values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


def test_a_resumed_run_goes_on_bit_for_bit(store: CheckpointStore) -> None:
    engine = trained()
    store.save(engine, 2, {"position": 17})
    info = store.load(resumed := make(warmup_steps=5))
    assert (info.step, info.user_state, info.world_size, info.rng) == (2, {"position": 17}, 1, "restored")
    for value in (3.0, 4.0):
        for each in (engine, resumed):
            step(each, value)
        assert same(engine, resumed)
    assert engine.schedule.state_dict() == resumed.schedule.state_dict()


def test_training_that_goes_on_during_the_write_does_not_leak_into_the_checkpoint(store: CheckpointStore) -> None:
    engine, twin = trained(), trained()
    may_write = threading.Event()

    def write_late(writer: CheckpointWriter) -> None:
        assert may_write.wait(60)
        WRITE(writer)

    position = {"done": [1, 2]}
    with mock.patch.object(CheckpointWriter, "write", write_late):
        store.save(engine, 2, position)
        position["done"].append(3)
        step(engine, 9.0)
        for group in engine.optimizer.param_groups:
            group["lr"] = 7.0
        may_write.set()
        store.wait()
    info = store.load(resumed := make(warmup_steps=5))
    assert info.user_state == {"done": [1, 2]}
    assert same(resumed, twin)
    for each in (resumed, twin):  # moments, counters and rates too
        step(each, 3.0)
    assert same(resumed, twin)


def test_a_staged_copy_never_aliases_live_tensors_and_its_memory_is_used_again() -> None:
    live = torch.ones(3)
    memory = StagingMemory()
    first = memory.copy({"weight": live, "settings": {"rates": [1]}})
    live.fill_(2.0)
    assert first["weight"].tolist() == [1.0, 1.0, 1.0]
    second = memory.copy({"weight": live, "settings": {"rates": [1]}})
    assert second["weight"].tolist() == [2.0, 2.0, 2.0]
    assert second["weight"].data_ptr() == first["weight"].data_ptr()


def test_a_second_save_waits_for_the_first(store: CheckpointStore) -> None:
    events: list[str] = []
    may_end = threading.Event()

    def slow_write(writer: CheckpointWriter) -> None:
        events.append("begin")
        if len(events) == 1:
            threading.Timer(0.2, may_end.set).start()
            may_end.wait(60)
        WRITE(writer)
        events.append("end")

    engine = trained()
    with mock.patch.object(CheckpointWriter, "write", slow_write):
        store.save(engine, 1)
        store.save(engine, 2)
        store.wait()
    assert events == ["begin", "end", "begin", "end"]
    assert store.steps() == [1, 2]


@pytest.mark.parametrize("when", ["writing", "publishing"])
def test_a_failed_write_is_told_by_the_next_call_and_leaves_the_one_before_intact(
    store: CheckpointStore, when: str
) -> None:
    engine = trained()
    store.save(engine, 1, wait=True)
    full = OSError(errno.ENOSPC, "No space left on device")
    target = {
        "writing": "verl_engine.engine.checkpoints.writer.FileSystemWriter.write_data",
        "publishing": "verl_engine.engine.checkpoints.folders.publish",
    }[when]
    with mock.patch(target, side_effect=full):
        store.save(engine, 2)
        with pytest.raises(WeightsError, match=rf"step 2, {when}.*No space left") as caught:
            store.save(engine, 3)
    assert caught.value.__cause__ is not None
    assert caught.value.__cause__.__cause__ is full
    assert [path.name for path in store.root.iterdir()] == ["step-00000001"]
    store.save(engine, 3, wait=True)  # told once; the job may go on
    assert store.steps() == [1, 3]
    assert store.load(make(warmup_steps=5), 1).step == 1


def test_a_write_in_the_foreground_tells_its_failure_itself(store: CheckpointStore) -> None:
    with (
        mock.patch.object(CheckpointWriter, "write", side_effect=RuntimeError("broken")),
        pytest.raises(WeightsError, match="broken"),
    ):
        store.save(trained(), 1, wait=True)
    assert store.latest() is None


def test_a_stuck_storage_is_named_after_the_time_limit(tmp_path: Path) -> None:
    may_end = threading.Event()
    store = CheckpointStore(tmp_path, timeout_s=0.1)
    with (
        mock.patch("verl_engine.engine.checkpoints.ranks._GRACE_S", 0.05),
        mock.patch.object(CheckpointWriter, "write", side_effect=lambda: may_end.wait(60)),
    ):
        store.save(trained(), 4)
        with pytest.raises(StuckError, match="rank 0 still writes the checkpoint of step 4"):
            store.wait()
        may_end.set()
    with pytest.raises(WeightsError):
        store.close()


def test_a_step_that_has_a_checkpoint_is_refused_until_it_is_removed(store: CheckpointStore) -> None:
    store.save(trained(1), 1, wait=True)
    with pytest.raises(WeightsError, match=r"step 1: .* holds one already; remove\(1\) first"):
        store.save(trained(2), 1)
    store.load(resumed := make(warmup_steps=5))
    assert same(resumed, trained(1))
    store.remove(1)
    store.save(trained(2), 1, wait=True)
    assert store.steps() == [1]
    with pytest.raises(WeightsError, match=r"no whole checkpoint of step 9; there are those of steps 1"):
        store.remove(9)


def test_two_stores_do_not_write_into_each_others_checkpoints(store: CheckpointStore) -> None:
    may_write = threading.Event()

    def write_late(writer: CheckpointWriter) -> None:
        may_write.wait(60)
        WRITE(writer)

    other = CheckpointStore(store.root)
    with mock.patch.object(CheckpointWriter, "write", write_late):
        store.save(trained(1), 1)
        for step in (1, 2):
            with pytest.raises(WeightsError, match="another store of this one, is writing a checkpoint to"):
                other.save(trained(2), step)
        may_write.set()
        store.wait()
    store.load(resumed := make(warmup_steps=5))
    assert same(resumed, trained(1))
    other.save(trained(2), 2, wait=True)
    assert store.steps() == [1, 2]


def test_an_engine_that_cannot_give_its_state_leaves_nothing(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainEngine, "state_dict", mock.Mock(side_effect=RuntimeError("no state")))
    with pytest.raises(RuntimeError, match="no state"):
        store.save(trained(1), 1)
    assert list(store.root.iterdir()) == []


def test_a_full_disk_is_told_as_such(store: CheckpointStore) -> None:
    """A limit on the size of files fails writes just as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(WeightsError, match=r"OSError: \[Errno \d+\] File too large"):
            store.save(trained(1), 1, wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_half_copied_checkpoint_can_be_removed_as_the_refusal_says(store: CheckpointStore) -> None:
    (store.root / "step-00000001").mkdir(parents=True)
    with pytest.raises(WeightsError, match=r"holds one already; remove\(1\) first"):
        store.save(trained(1), 1)
    store.remove(1)
    store.save(trained(1), 1, wait=True)
    assert store.steps() == [1]


def test_the_last_ones_are_kept_and_older_ones_go_after_the_new_one_is_whole(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    engine = trained()
    for number in (1, 2):
        store.save(engine, number, wait=True)
    with (
        mock.patch("verl_engine.engine.checkpoints.folders.publish", side_effect=OSError("lost")),
        pytest.raises(WeightsError),
    ):
        store.save(engine, 3, wait=True)
    assert store.steps() == [1, 2]
    store.save(engine, 4, wait=True)
    assert store.steps() == [2, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]


def test_after_going_back_the_new_one_is_kept_beside_later_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    for number in (5, 3):
        store.save(trained(), number, wait=True)
    assert store.steps() == [3, 5]
    store.remove(5)
    store.save(trained(), 4, wait=True)
    assert store.steps() == [4]


def test_an_old_one_that_cannot_be_deleted_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(trained(), 1, wait=True)
    with mock.patch("verl_engine.engine.checkpoints.folders.delete", side_effect=OSError("not yours")):
        store.save(trained(), 2, wait=True)
    assert store.latest() == 2
    assert "could not be deleted: not yours" in caplog.text


def test_keeping_none_and_a_negative_step_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last=0 must be 1 or more"):
        CheckpointStore(tmp_path, keep_last=0).save(trained(), 1)
    with pytest.raises(ConfigError, match="step=-1 must be 0 or more"):
        CheckpointStore(tmp_path).save(trained(), -1)


def test_half_ones_are_never_found_and_cleared_away_at_the_next_save(store: CheckpointStore) -> None:
    store.save(trained(), 1, wait=True)
    whole = store.root / "step-00000001"
    for name in (".step-00000002.partial", ".step-00000003.deleted"):
        shutil.copytree(whole, store.root / name)
    shutil.copytree(whole, store.root / "step-00000004", ignore=shutil.ignore_patterns(".metadata"))
    (store.root / ".others").mkdir()
    assert store.steps() == [1]
    assert store.latest() == 1
    store.save(trained(), 5, wait=True)
    assert sorted(path.name for path in store.root.iterdir()) == [
        ".others",
        "step-00000001",
        "step-00000004",
        "step-00000005",
    ]
