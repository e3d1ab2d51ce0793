"""One trainer rank in its process, with the buffers that its weights leave through."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from verl_async.orchestrator.shared_slots import SharedSlots

if TYPE_CHECKING:
    import numpy.typing as npt

    from verl_engine.engine.weights.bucket import WeightBucket
    from verl_engine.engine.worker import EngineWorker


class TrainerHost:
    """Blocking calls around an `EngineWorker`; every rank makes the same ones, and rank 0 holds the buffers."""

    def __init__(self, worker: EngineWorker, rank: int) -> None:
        """Take a worker whose engine was created."""
        self.worker = worker
        self._rank = rank
        self._buckets: list[WeightBucket] = []
        self._slots: SharedSlots | None = None

    def plan_weight_buckets(self, bucket_bytes: int, dtype: str) -> list[WeightBucket]:
        """Divide the weights into buckets; the plan holds until the next."""
        self._buckets = self.worker.plan_weight_buckets(bucket_bytes, dtype)
        return self._buckets

    def open_slots(self) -> list[str]:
        """On rank 0, make shared buffers for the buckets of the plan and return their paths."""
        self._slots = SharedSlots.create(max(bucket.num_bytes for bucket in self._buckets))
        return self._slots.paths

    def unlink_slots(self) -> None:
        """Remove the buffers' names, once every reader has mapped them."""
        if self._slots is not None:
            self._slots.unlink()

    def write_weight_bucket(self, index: int, slot: int) -> tuple[int | npt.NDArray[np.uint8], int]:
        """Gather a bucket; rank 0 lays it into a shared slot, or into fresh memory where no slots are open.

        Returns:
            On rank 0 the slot's number, or the bytes; and their checksum.
        """
        bucket = self._buckets[index]
        if self._rank != 0:
            return slot, self.worker.write_weight_bucket(bucket, None)
        if self._slots is None:
            fresh = np.empty(bucket.num_bytes, np.uint8)
            return fresh, self.worker.write_weight_bucket(bucket, fresh)
        return slot, self.worker.write_weight_bucket(bucket, self._slots[slot])
