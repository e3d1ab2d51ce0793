"""What a backend's hooks fill and read: one rank's weights at one moment."""

from collections.abc import Iterable
from typing import NamedTuple, Self

import torch

from verl_engine.contract.choices import require_choice
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.snapshots.checksum import spread_sample, weights_checksum
from verl_engine.engine.snapshots.memory import SnapshotKind, SnapshotMemory
from verl_engine.engine.snapshots.shared import SharedSlot, SnapshotHandle
from verl_engine.engine.snapshots.slot import Slot
from verl_engine.engine.weights.bucket import WeightBucket
from verl_engine.engine.weights.module_weights import local_tensors


class _Source(NamedTuple):
    weights_id: int
    tensors: tuple[object, ...]


class WeightSnapshot:
    """One rank's weights, in memory that nothing else uses."""

    def __init__(
        self, tag: str, memory: SnapshotMemory | None = None, kind: SnapshotKind | None = None, label: str = ""
    ) -> None:
        """Start empty, with a slot of `kind` from `memory`, by default of its own.

        Messages call it `label`, by default ``tag 'name'``.
        """
        self.tag = tag
        self.version = 0
        """Optimizer steps that the engine's owner had counted when it was taken."""
        self.tensors: dict[str, torch.Tensor] = {}
        """This rank's shards, on the CPU, contiguous."""
        self.weights_id: int | None = None
        """That of the engine during a call of `store` or `copy_into`. None: whether weights changed is not known."""
        self._label = label or f"tag {tag!r}"
        self._memory = memory or SnapshotMemory()
        self._kind = self._memory.kind if kind is None else kind
        require_choice("the kind of a snapshot", self._kind, SnapshotKind)
        self._slot: Slot | None = None
        self._source: _Source | None = None
        self._checksum: tuple[dict[str, torch.Tensor], int] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights; see `Snapshots.held_bytes` for the memory they take."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def checksum(self) -> int:
        """CRC-32 over names and bytes, in order of the names; computed when it is first asked for."""
        if self._checksum is None or self._checksum[0] is not self.tensors:
            self._checksum = self.tensors, weights_checksum(self.tensors)
        return self._checksum[1]

    def store(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Self:
        """Copy tensors in, into the memory of an earlier copy where names, shapes and dtypes still fit.

        Nothing is copied if these tensors are known to have the values that it holds: since it was filled from them, or
        copied into them, the engine's `weights_id`, the tensors' places and version counters, and a sample of their
        values are the same.

        Args:
            weights: this rank's shards by name: on any device, of any dtype and strides, empty ones too.
        Raises:
            WeightsError: there is no room for them; the snapshot holds what it held before.
        """
        live = dict(local_tensors(weights))
        if self._is_filled_from(live):
            assert self._slot is not None
            self._slot.set_version(self.version)
            return self
        slot = self._memory.slot_for(self._label, WeightBucket.of(live), self._slot, self._kind)
        own = slot.begin()
        if slot is self._slot and not isinstance(slot, SharedSlot):
            self.tensors, self._source = {}, None  # should the copy fail, it holds nothing
        self._copy(list(own.values()), list(live.values()))
        slot.commit(self.version)
        self._memory.settle(self._label, slot)
        self.tensors, self._slot = dict(own), slot
        self._source = self._describe(live)
        return self

    def copy_into(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy into live tensors, in place; a WeightsError, before any is, where names, shapes or dtypes are others."""
        live = dict(local_tensors(weights))
        if live.keys() != self.tensors.keys():
            odd = sorted(live.keys() ^ self.tensors.keys())
            raise WeightsError(
                f"snapshot {self.tag!r} and the engine do not hold the same weights: {', '.join(odd[:5])}"
            )
        for name, tensor in live.items():
            own = self.tensors[name]
            if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
                raise WeightsError(
                    f"snapshot {self.tag!r} holds {name} as {own.dtype} of shape {tuple(own.shape)}, the engine as "
                    f"{tensor.dtype} of shape {tuple(tensor.shape)}"
                )
        self._copy(list(live.values()), [self.tensors[name] for name in live])
        self._source = self._describe(live)

    def handle(self) -> SnapshotHandle:
        """Return what a `SnapshotReader` needs; a WeightsError where it is not in shared memory."""
        if not isinstance(self._slot, SharedSlot):
            raise WeightsError(
                f"snapshot {self.tag!r} is not in shared memory; set engine.snapshot_memory=shared, and let the "
                "backend's engine_copy_weights_to_cpu fill it by snapshot.store()"
            )
        return self._slot.handle(self.tag)

    def clear(self) -> None:
        """Forget the weights and give the memory back."""
        self._memory.give_back(self._label)
        self.tensors, self._slot, self._source = {}, None, None

    def _copy(self, into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
        if not into:
            return
        is_asynchronous = any(tensor.device.type != "cpu" for tensor in (*into, *source))
        with torch.no_grad():
            torch._foreach_copy_(into, source, non_blocking=is_asynchronous)
        if is_asynchronous:
            self._memory.device.synchronize()  # the host may read, and write, on return

    def _is_filled_from(self, live: dict[str, torch.Tensor]) -> bool:
        if self._source is None or self._source != self._describe(live):
            return False
        # Version counters do not see everything, such as an optimizer's step on DTensors: look at the values too.
        return torch.equal(spread_sample(live), spread_sample(self.tensors))

    def _describe(self, live: dict[str, torch.Tensor]) -> _Source | None:
        if self.weights_id is None or any(tensor.is_inference() for tensor in live.values()):
            return None  # tensors of torch.inference_mode have no version counter
        return _Source(
            self.weights_id,
            tuple(
                (name, tensor.data_ptr(), tensor._version, tensor.shape, tensor.stride(), tensor.dtype, tensor.device)  # noqa: SLF001 - torch documents it
                for name, tensor in live.items()
            ),
        )
