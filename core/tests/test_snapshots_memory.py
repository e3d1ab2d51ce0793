"""Memory of snapshots: reused, bounded, and given back."""

from __future__ import annotations

import gc
from typing import Any, ClassVar

import pytest
import torch

from core.tests.snapshot_engine import change, make_engine, make_snapshots, same, values
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.device import Device
from verl_engine.engine.snapshots.checksum import spread_sample
from verl_engine.engine.snapshots.memory import SnapshotMemory
from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot
from verl_engine.engine.weights.bucket import WeightBucket

SLOT = 192 + 64 + 0 + 64 + 64
"""Bytes of one slot of the engine's weights: each at a multiple of 64."""


def place(snapshot: WeightSnapshot) -> int:
    return snapshot.tensors["logits"].data_ptr()


def test_each_weight_begins_at_a_multiple_of_64_bytes() -> None:
    layout = WeightBucket.of({"a": torch.zeros(17), "none": torch.zeros(0), "b": torch.zeros((), dtype=torch.bool)})
    assert [(entry.name, entry.offset) for entry in layout.entries] == [("a", 0), ("none", 128), ("b", 128)]
    assert layout.num_bytes == 192
    views = layout.views(torch.zeros(192, dtype=torch.uint8))
    assert {name: (view.shape, view.dtype) for name, view in views.items()} == {
        "a": ((17,), torch.float32),
        "none": ((0,), torch.float32),
        "b": ((), torch.bool),
    }


def test_saving_again_uses_the_same_memory() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    first = place(snapshots.save("kept"))
    change(engine, 1.0)
    assert place(snapshots.save("kept")) == first
    assert snapshots.held_bytes == SLOT


def test_the_memory_of_a_dropped_tag_is_the_next_tags_and_only_one_is_kept() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    places = {tag: place(snapshots.save(tag)) for tag in ("1", "2", "3")}
    for tag in places:
        snapshots.drop(tag)
    assert snapshots.held_bytes == SLOT
    assert place(snapshots.save("4")) == places["3"]
    assert snapshots.held_bytes == SLOT


def test_swapped_uses_the_memory_of_a_dropped_tag() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    for tag in ("1", "2"):
        snapshots.save(tag)
    snapshots.drop("1")
    with snapshots.swapped("2"):
        assert snapshots.held_bytes == 2 * SLOT


def test_closing_frees_everything_and_leaves_the_snapshots_usable() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("1")
    with snapshots.swapped("1"):
        pass
    snapshots.close()
    assert snapshots.held_bytes == 0
    snapshots.save("1")
    with snapshots.swapped("1"):
        pass


def test_a_limit_says_what_holds_how_much_and_keeps_what_was_there() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine, limit_bytes=2 * SLOT)
    snapshots.save("1", version=5)
    snapshots.save("2")
    with pytest.raises(WeightsError) as caught:
        snapshots.save("3")
    assert str(caught.value) == (
        "engine.snapshot_limit_bytes=768 (0.75 KiB per rank) has no room for tag '3', which takes 0.38 KiB; held are: "
        "tag '1' 0.38 KiB, tag '2' 0.38 KiB. Drop a tag (clear_cpu_model), or raise the limit"
    )
    with pytest.raises(WeightsError, match="no weights were saved under '3'"):
        snapshots.restore("3")
    with pytest.raises(WeightsError, match="no room for current weights before swapped"), snapshots.swapped("1"):
        raise AssertionError("swapped needs room for the current weights")
    before = values(engine)
    change(engine, 3.0)
    snapshots.save("2")  # into its own memory: no more is needed
    snapshots.restore("1")
    assert same(values(engine), before)
    snapshots.drop("2")
    snapshots.save("3")  # a dropped tag's memory counts for the next


def test_weights_of_other_shapes_leave_the_former_content_where_there_is_no_room() -> None:
    memory = SnapshotMemory(limit_bytes=300)
    snapshot = WeightSnapshot("kept", memory).store([("a", torch.ones(32))])
    with pytest.raises(WeightsError, match="no room for tag 'kept'"):
        snapshot.store([("a", torch.ones(64))])
    assert torch.equal(snapshot.tensors["a"], torch.ones(32))
    live = torch.zeros(32)
    snapshot.copy_into([("a", live)])
    assert live.all()
    snapshot.store([("a", torch.ones(8))])
    assert memory.held_bytes == 64 + 128  # the former is kept for others
    WeightSnapshot("other", memory).store([("a", torch.ones(32))])
    assert memory.held_bytes == 64 + 128


def test_spare_memory_gives_way_to_a_limit() -> None:
    memory = SnapshotMemory(limit_bytes=256)
    snapshot = WeightSnapshot("a", memory).store([("a", torch.ones(32))])
    snapshot.clear()
    WeightSnapshot("b", memory).store([("a", torch.ones(64))])
    assert memory.held_bytes == 256


def test_memory_that_the_machine_does_not_have_is_an_error_of_the_tree() -> None:
    class Endless(torch.Tensor):
        """Says it is larger than any machine."""

        def numel(self) -> int:
            return 2**60

    layout = WeightBucket.of({"a": torch.ones(1).as_subclass(Endless)})
    with pytest.raises(WeightsError, match=r"a snapshot needs 4294967296\.00 GiB of memory"):
        SnapshotMemory().slot_for("tag 'a'", layout, None, "private")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_sample_sees_a_change_of_all_values(dtype: torch.dtype) -> None:
    zeros, ones = torch.zeros(33, 5, dtype=dtype), torch.ones(33, 5, dtype=dtype)
    assert torch.equal(spread_sample({"a": zeros.clone()}), spread_sample({"a": zeros}))
    assert not torch.equal(spread_sample({"a": zeros}), spread_sample({"a": ones}))
    assert spread_sample({"a": torch.zeros(10**6, dtype=dtype)}).numel() <= 30


def test_an_alias_of_nothing_is_left_behind() -> None:
    """Neither the engine nor a closed snapshot holds on to memory."""
    engine = make_engine()
    snapshots = make_snapshots(engine)
    storages: Any = snapshots.save("1").tensors["logits"].untyped_storage()
    live = {tensor.untyped_storage().data_ptr() for _, tensor in engine.local_weights()}
    assert storages.data_ptr() not in live
    snapshots.close()
    gc.collect()
    assert snapshots.held_bytes == 0


class NotingDevice(Device):
    """Notes when the host waits for it."""

    calls: ClassVar[list[str]] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")


def test_copies_from_and_to_an_accelerator_are_asynchronous_and_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shown on torch's meta device, whose copies are noted instead of made."""
    calls = NotingDevice.calls

    def note(_: object, __: object, *, non_blocking: bool) -> None:
        calls.append("asynchronous" if non_blocking else "at once")

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    snapshot = WeightSnapshot("kept", SnapshotMemory(device=NotingDevice("cpu")))
    remote = [("a", torch.empty(3, device="meta")), ("on the CPU", torch.zeros(2))]
    snapshot.store(remote)
    snapshot.copy_into(remote)
    assert calls == ["asynchronous", "synchronize"] * 2
    snapshot.store([("a", torch.ones(3))])
    assert calls[4:] == ["at once"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is memory to pin here")
def test_slots_beside_an_accelerator_are_pinned() -> None:
    with pytest.raises(WeightsError, match="GiB of pinned memory, which this machine does not give"):
        WeightSnapshot("kept", SnapshotMemory(device=Device("cuda"))).store([("a", torch.ones(3))])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_weights_on_a_gpu_are_kept_and_come_back() -> None:
    memory = SnapshotMemory(device=Device("cuda"))
    live = {
        "a": torch.arange(1 << 20, device="cuda"),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": torch.zeros(0).cuda(),
    }
    snapshot = WeightSnapshot("kept", memory)
    snapshot.weights_id = 0
    for _ in range(2):  # the second time by comparing samples
        snapshot.store(live.items())
    assert all(tensor.is_pinned() or not tensor.numel() for tensor in snapshot.tensors.values())
    assert torch.equal(snapshot.tensors["a"], torch.arange(1 << 20))
    live["a"].zero_()
    snapshot.copy_into(live.items())
    assert torch.equal(live["a"].cpu(), torch.arange(1 << 20))
