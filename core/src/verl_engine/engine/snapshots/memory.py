"""The memory of a rank's snapshots: slots that are made once, reused, and kept under one limit."""

from typing import Literal

from verl_engine.contract.choices import require_choice
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.device import Device
from verl_engine.engine.snapshots.shared import SharedSlot
from verl_engine.engine.snapshots.slot import PrivateSlot, Slot
from verl_engine.engine.weights.bucket import WeightBucket

SnapshotKind = Literal["private", "shared"]
"""See ``engine.snapshot_memory``."""


class SnapshotMemory:
    """Hands out slots. One that its tag gave back is kept for the next tag, since new memory is what takes long."""

    def __init__(
        self, kind: SnapshotKind = "private", limit_bytes: int | None = None, device: Device | None = None
    ) -> None:
        """Start without any slot; `limit_bytes` is for all together, None for as much as there is.

        The device is the one that the weights are on, by default the CPU. On an accelerator private slots are pinned.
        """
        require_choice("the kind of snapshots", kind, SnapshotKind)
        self.kind: SnapshotKind = kind
        self.device = device or Device("cpu")
        self._limit_bytes = limit_bytes
        self._used: dict[str, Slot] = {}
        self._spare: Slot | None = None

    @property
    def held_bytes(self) -> int:
        """Memory that all slots take, the spare one too."""
        spare = self._spare.held_bytes if self._spare is not None else 0
        return spare + sum(slot.held_bytes for slot in self._used.values())

    def slot_for(self, owner: str, layout: WeightBucket, former: Slot | None, kind: SnapshotKind) -> Slot:
        """Return a slot to fill: the former one, which stays as it is, where it fits, else another.

        Call `settle` when it is filled. A WeightsError that names the owner where the limit, or the machine, does not
        allow it.
        """
        if former is not None and former.layout == layout:
            self._make_room(owner, former.growth_bytes)
            return former
        made = PrivateSlot if kind == "private" else SharedSlot
        spare, self._spare = self._spare, None
        if spare is not None and spare.layout == layout and isinstance(spare, made):
            return spare
        if spare is not None:
            spare.close()
        if kind == "shared":
            self._make_room(owner, SharedSlot.first_bytes(layout))
            return SharedSlot(layout)
        self._make_room(owner, layout.num_bytes)
        return PrivateSlot(layout, pinned=self.device.kind != "cpu")

    def settle(self, owner: str, slot: Slot) -> None:
        """Note that an owner has filled a slot, and needs the one that it had before no longer."""
        former = self._used.get(owner)
        self._used[owner] = slot
        if former is not None and former is not slot:
            self._keep_spare(former)

    def give_back(self, owner: str) -> None:
        """Take an owner's slot, if it has one; the latest is kept for the next owner."""
        slot = self._used.pop(owner, None)
        if slot is not None:
            self._keep_spare(slot)

    def close(self) -> None:
        """Free everything."""
        for slot in (*self._used.values(), *([self._spare] if self._spare is not None else [])):
            slot.close()
        self._used, self._spare = {}, None

    def _keep_spare(self, slot: Slot) -> None:
        slot.retire()
        if self._spare is not None:
            self._spare.close()
        self._spare = slot

    def _make_room(self, owner: str, num_bytes: int) -> None:
        if self._limit_bytes is None or self.held_bytes + num_bytes <= self._limit_bytes:
            return
        if self._spare is not None:
            self._spare.close()
            self._spare = None
            self._make_room(owner, num_bytes)
            return
        held = ", ".join(f"{name} {_size(slot.held_bytes)}" for name, slot in self._used.items()) or "nothing"
        raise WeightsError(
            f"engine.snapshot_limit_bytes={self._limit_bytes} ({_size(self._limit_bytes)} per rank) has no room for "
            f"{owner}, which takes {_size(num_bytes)}; held are: {held}. Drop a tag (clear_cpu_model), or "
            "raise the limit"
        )


def _size(num_bytes: int) -> str:
    unit, divisor = ("GiB", 2**30) if num_bytes >= 2**30 else ("MiB", 2**20) if num_bytes >= 2**20 else ("KiB", 2**10)
    return f"{num_bytes / divisor:.2f} {unit}"
