"""A rollout engine in its process, with the weights that are on their way to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_async.asynchrony.actors import Acknowledgement
from verl_async.asynchrony.shared_slots import SharedSlots
from verl_engine.contract.errors import UnsupportedError, WeightsError
from verl_engine.engine.weights.bucket import combine_checksums, read_bucket

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from verl_async.rollout.interface import Generation, GenerationRequest, RolloutEngine
    from verl_engine.engine.weights.bucket import WeightBucket


class RolloutHost:
    """Blocking calls around a `RolloutEngine`; an actor or a test runs them in a thread."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Take an engine that has loaded its model."""
        self._engine = engine
        self._slots: SharedSlots | None = None
        self._checksums: list[int] = []

    def attach_slots(self, paths: list[str]) -> None:
        """Map the trainer's shared buffers."""
        self._slots = SharedSlots(paths)

    def generate(self, requests: list[GenerationRequest]) -> list[Generation]:
        """Generate; see `RolloutEngine.generate`."""
        return self._engine.generate(requests)

    def interrupt(self) -> None:
        """Make a running `generate` return after its current token."""
        self._engine.interrupt()

    def load_bucket(self, bucket: WeightBucket, payload: int | npt.NDArray[np.uint8], checksum: int) -> None:
        """Check a bucket and copy it into the model.

        Args:
            bucket: what lies where.
            payload: the number of a shared slot, or the bytes themselves.
            checksum: of the bytes that were written.
        Raises:
            WeightsError: other bytes arrived, or the model has no such weight.
        """
        if isinstance(payload, int):
            assert self._slots is not None, "attach_slots comes first"
            buffer = self._slots[payload]
        else:
            buffer = payload if payload.flags.writeable else payload.copy()  # torch takes no read-only memory
        self._engine.load_weights(read_bucket(buffer, bucket, checksum))
        self._checksums.append(checksum)

    def commit_weights(self, version: int) -> Acknowledgement:
        """Put the loaded weights in use, and return what the engine then has.

        Raises:
            WeightsError: some weights did not arrive.
        """
        self._engine.commit_weights(version)
        checksum = combine_checksums(self._checksums)
        self._checksums = []
        return Acknowledgement(self._engine.version, checksum)

    def save_pretrained(self, folder: Path) -> str:
        """Write the current weights, the last copy where the trainer is gone; return their version and dtype.

        Raises:
            WeightsError: a sync was under way, so that they are of two versions.
            UnsupportedError: the engine cannot write its weights.
        """
        if self._checksums:
            raise WeightsError("a weight sync was under way: the weights are of two versions")
        save = getattr(self._engine, "save_pretrained", None)
        if save is None:
            raise UnsupportedError(f"{type(self._engine).__name__} cannot write its weights")
        return f"version {self._engine.version}, {save(folder)}"
