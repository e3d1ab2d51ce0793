"""Snapshots of weights on the CPU, by tag: for old-policy log-probs, for trying a step and taking it back."""

from collections.abc import Iterator
from contextlib import contextmanager

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.base import Engine
from verl_engine.engine.snapshots.memory import SnapshotKind, SnapshotMemory
from verl_engine.engine.snapshots.shared import SnapshotHandle
from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot
from verl_engine.host.backend_host import BackendHost


class Snapshots:
    """The snapshots of one engine on one rank; every rank makes the same calls. An unknown tag is a WeightsError."""

    def __init__(
        self, host: BackendHost, engine: Engine, memory: SnapshotKind = "private", limit_bytes: int | None = None
    ) -> None:
        """Start without any, as the config says of memory; an UnsupportedError where the backend has none."""
        host.require("snapshots")
        self._host = host
        self._engine = engine
        self._memory = SnapshotMemory(memory, limit_bytes, engine.device)
        self._kept: dict[str, WeightSnapshot] = {}
        self._current = WeightSnapshot("current", self._memory, kind="private", label="current weights before swapped")
        """What `swapped` brings back."""
        self._is_swapped = False

    @property
    def held_bytes(self) -> int:
        """Memory that all snapshots of this rank take, with that kept for reuse."""
        return self._memory.held_bytes

    def save(self, tag: str, version: int = 0) -> WeightSnapshot:
        """Keep the current weights, over what the tag held before; nothing is copied if they are the same.

        A WeightsError where there is no room; the tag holds what it held before.
        """
        snapshot = self._kept.get(tag) or WeightSnapshot(tag, self._memory)
        former, snapshot.version = snapshot.version, version
        try:
            self._kept[tag] = self._copy(snapshot)
        except BaseException:
            snapshot.version = former
            raise
        return self._kept[tag]

    def restore(self, tag: str) -> None:
        """Make the weights of a tag current again; where they do not fit, a WeightsError, and nothing was changed."""
        self._put_back(self._get(tag))

    def drop(self, tag: str) -> None:
        """Forget a tag. One tag's memory is kept for the next; see `close`."""
        self._get(tag).clear()
        del self._kept[tag]

    @contextmanager
    def swapped(self, tag: str) -> Iterator[None]:
        """Use the weights of a tag inside; the former ones come back in any case, from memory that is kept.

        A WeightsError where there is no room, or inside another `swapped`.
        """
        snapshot = self._get(tag)
        if self._is_swapped:
            raise WeightsError(f"swapped({tag!r}) inside another swapped: leave that one first")
        current = self._copy(self._current)
        self._is_swapped = True
        try:
            self._put_back(snapshot)
            yield
        finally:
            self._is_swapped = False
            self._put_back(current)

    def handle(self, tag: str) -> SnapshotHandle:
        """Return what a `SnapshotReader` needs until the tag is dropped; a WeightsError without shared memory."""
        return self._get(tag).handle()

    def close(self) -> None:
        """Forget all tags and free all memory, files in shared memory too. Harmless when called twice."""
        for snapshot in (*self._kept.values(), self._current):
            snapshot.clear()
        self._kept.clear()
        self._memory.close()

    def _copy(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        with self._telling_weights_id(snapshot):
            return self._host.copy_weights_to_cpu(self._engine, snapshot)

    def _put_back(self, snapshot: WeightSnapshot) -> None:
        # Before the copy: should it fail halfway, no other snapshot takes the weights for its own.
        self._engine.note_weights_changed()
        with self._telling_weights_id(snapshot):
            self._host.restore_weights_from_cpu(self._engine, snapshot)

    @contextmanager
    def _telling_weights_id(self, snapshot: WeightSnapshot) -> Iterator[None]:
        """Let the snapshot know which weights the engine has, for the time of a hook."""
        snapshot.weights_id = self._engine.weights_id
        try:
            yield
        finally:
            snapshot.weights_id = None

    def _get(self, tag: str) -> WeightSnapshot:
        if tag not in self._kept:
            raise WeightsError(f"no weights were saved under {tag!r}; saved are {sorted(self._kept) or 'none'}")
        return self._kept[tag]
