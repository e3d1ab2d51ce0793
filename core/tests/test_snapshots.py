"""Snapshots: what is kept, when nothing need be copied, and what comes back."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch

from core.tests.snapshot_engine import change, make_engine, make_snapshots, same, values
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from core.tests.snapshot_engine import KeepingEngine


class Copies:
    """Counts how often the weights were copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        copy = torch._foreach_copy_

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return copy(*arguments, **options)

        monkeypatch.setattr(torch, "_foreach_copy_", counted)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def take_a_step(engine: KeepingEngine) -> None:
    """As train_step does it, which notes the change."""
    engine.parameters["logits"].grad = torch.ones_like(engine.parameters["logits"])
    assert engine.optimizer_step().applied
    engine.note_weights_changed()


def change_behind_the_version_counter(engine: KeepingEngine) -> None:
    engine.parameters["logits"].data.copy_(torch.full((8, 5), 3.0))
    engine.note_weights_changed()


def change_dense_and_unseen(engine: KeepingEngine) -> None:
    """Neither a version counter nor weights_id sees this; as with an optimizer of one's own on DTensors."""
    engine.parameters["logits"].data.copy_(torch.full((8, 5), 3.0))


def step_by_hand(engine: KeepingEngine) -> None:
    """Changes a single entry, which a sample would not see; as with DTensors, no version counter does either."""
    logits = engine.parameters["logits"]
    logits.grad = torch.zeros_like(logits)
    logits.grad[1, 2] = 1.0
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(logits):
        engine.optimizer.step()


def import_weights(engine: KeepingEngine) -> None:
    engine.load_full_weights([(spec.name, torch.full(spec.shape, 2.0)) for spec in engine.weight_specs()])


def replace_by_the_same_values(engine: KeepingEngine) -> None:
    """As a move to the CPU and back: other memory."""
    parameter = engine.parameters["logits"]
    parameter.data = parameter.data.clone()


CHANGES: dict[str, Callable[[KeepingEngine], None]] = {
    "in place": lambda engine: change(engine, 2.0),
    "behind the version counter, noted": change_behind_the_version_counter,
    "dense, unseen": change_dense_and_unseen,
    "training step": take_a_step,
    "step by hand": step_by_hand,
    "weight import": import_weights,
    "other memory": replace_by_the_same_values,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_save_after_a_change_holds_it(name: str, copies: Copies) -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("kept")
    CHANGES[name](engine)
    after = values(engine)
    saved = snapshots.save("kept")
    assert copies.count == 2
    assert same(saved.tensors, after)
    change(engine, 9.0)
    snapshots.restore("kept")
    assert same(values(engine), after)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_after_a_restore_is_saved(name: str) -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("kept")
    change(engine, 9.0)
    snapshots.restore("kept")
    CHANGES[name](engine)
    assert same(snapshots.save("kept").tensors, values(engine))


def test_nothing_is_copied_while_nothing_changes(copies: Copies) -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("kept", version=1)
    assert snapshots.save("kept", version=2).version == 2
    assert copies.count == 1
    snapshots.restore("kept")  # always copies: what it is for is bringing weights back
    assert copies.count == 2
    snapshots.save("kept")
    assert copies.count == 2


def test_another_tag_holds_its_own_copy_of_the_same_weights(copies: Copies) -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    first, second = snapshots.save("a"), snapshots.save("b")
    assert copies.count == 2
    assert first.tensors["logits"].data_ptr() != second.tensors["logits"].data_ptr()


def test_weights_of_inference_mode_are_copied_each_time(copies: Copies) -> None:
    snapshot = WeightSnapshot("kept")
    with torch.inference_mode():
        weight = torch.ones(3)
    snapshot.weights_id = 0
    for _ in range(2):
        snapshot.store([("weight", weight)])
    assert copies.count == 2


def test_swapped_costs_two_copies_once_its_memory_is_there_and_restores_in_any_case(copies: Copies) -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    first = values(engine)
    snapshots.save("first")
    change(engine, 5.0)
    second = values(engine)
    with snapshots.swapped("first"):
        assert same(values(engine), first)
    assert same(values(engine), second)
    held = snapshots.held_bytes
    copies.count = 0
    with suppress(ZeroDivisionError), snapshots.swapped("first"):
        change(engine, 8.0)
        raise ZeroDivisionError
    assert copies.count == 2  # the current ones were still kept from the time before
    assert same(values(engine), second)
    assert snapshots.held_bytes == held
    assert same(snapshots.save("second").tensors, second)


def test_a_save_after_swapped_is_of_the_current_weights() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("first")
    change(engine, 5.0)
    with snapshots.swapped("first"):
        pass
    assert same(snapshots.save("first").tensors, values(engine))


def test_swapped_is_not_nested() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("first")
    before = values(engine)
    with snapshots.swapped("first"), pytest.raises(WeightsError, match="inside another swapped"):
        snapshots.swapped("first").__enter__()
    assert same(values(engine), before)
    with snapshots.swapped("first"):
        pass


def test_unknown_tags_are_refused_everywhere() -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("a")
    for call in (snapshots.restore, snapshots.drop, snapshots.handle, lambda tag: snapshots.swapped(tag).__enter__()):
        with pytest.raises(WeightsError, match=r"no weights were saved under 'b'; saved are \['a'\]"):
            call("b")


def test_a_snapshot_holds_what_is_trained_and_buffers_but_nothing_frozen() -> None:
    engine = make_engine()
    saved = make_snapshots(engine).save("kept", version=3)
    assert list(saved.tensors) == ["logits", "small", "empty", "count", "mask"]
    assert saved.num_bytes == 40 * 4 + 6 * 2 + 0 + 8 + 3
    assert (saved.tag, saved.version) == ("kept", 3)
    assert all(tensor.is_contiguous() for tensor in saved.tensors.values())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in saved.tensors.values() if tensor.numel())


def test_the_checksum_is_of_the_content_and_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    saved = snapshots.save("kept")
    first = saved.checksum
    assert make_snapshots(make_engine()).save("other").checksum == first
    with monkeypatch.context() as patch:
        patch.setattr("verl_engine.engine.snapshots.weight_snapshot.weights_checksum", None)
        assert snapshots.save("kept").checksum == first
    change(engine, 1.0)
    assert snapshots.save("kept").checksum != first


@pytest.mark.parametrize(
    ("live", "says"),
    [
        ({"a": torch.zeros(2), "c": torch.zeros(3)}, "do not hold the same weights: b, c"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"holds b as torch.float32 of shape \(3,\), the engine as"),
        ({"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.int32)}, r"the engine as torch.int32 of shape \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_copied(live: dict[str, torch.Tensor], says: str) -> None:
    snapshot = WeightSnapshot("kept").store([("a", torch.ones(2)), ("b", torch.ones(3))])
    with pytest.raises(WeightsError, match=says):
        snapshot.copy_into(live.items())
    assert not live["a"].any()


def test_a_copy_that_fails_halfway_leaves_a_snapshot_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    snapshots = make_snapshots(engine)
    snapshots.save("kept")
    change(engine, 2.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            snapshots.save("kept")
    with pytest.raises(WeightsError, match="do not hold the same weights"):
        snapshots.restore("kept")
    snapshots.save("kept")
    snapshots.restore("kept")


def test_the_same_weights_in_other_strides_come_back() -> None:
    wide = torch.arange(12.0).reshape(3, 4)
    snapshot = WeightSnapshot("kept").store([("view", wide.t()), ("number", torch.tensor(5))])
    live = torch.zeros(4, 6)[:, ::2]
    number = torch.tensor(0)
    snapshot.copy_into([("view", live), ("number", number)])
    assert torch.equal(live, wide.t())
    assert number == 5
