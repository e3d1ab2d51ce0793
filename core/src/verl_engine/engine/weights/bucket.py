"""Weights as flat byte buckets: how they go from the trainer to the rollout engine.

The plan follows from names, shapes and dtypes alone, so every rank and every reader computes or receives the same one.
Memory is bounded by the bucket's size and one gathered weight.
"""

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Final, Self

import numpy as np
import numpy.typing as npt
import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.base import Engine, WeightSpec
from verl_engine.engine.weights.held_dtypes import cast_dtype

_ALIGNMENT: Final = 64
"""Bytes; a cache line, and a multiple of every dtype's size."""


@dataclass(frozen=True, slots=True)
class BucketEntry:
    """Where one tensor lies in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Torch's name without the prefix, such as ``bfloat16``."""
    offset: int
    """Bytes from the bucket's start."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * _dtype(self.dtype).itemsize

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Look at its part of a flat uint8 buffer as the tensor, without a copy."""
        return buffer[self.offset : self.offset + self.num_bytes].view(_dtype(self.dtype)).view(self.shape)


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """One bucket of a plan, or all weights of a snapshot. Equal ones can use each other's memory."""

    entries: tuple[BucketEntry, ...]
    num_bytes: int
    """Of the whole buffer, the gaps between tensors included."""

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> Self:
        """Lay tensors out one after the other, in their order."""
        entries = []
        end = 0
        for name, tensor in weights.items():
            entries.append(BucketEntry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(entries), end)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Look at a buffer, [num_bytes] uint8 or longer, as the tensors that it holds, without a copy."""
        return {entry.name: entry.view(buffer) for entry in self.entries}


def plan_buckets(
    specs: Sequence[WeightSpec],
    bucket_bytes: int,
    dtype: torch.dtype | None = None,
    held: Mapping[str, torch.dtype] | None = None,
) -> list[WeightBucket]:
    """Lay weights into buckets in order; one that is larger than a bucket gets one of its own size.

    Floating-point weights are cast to `dtype`, if it is given, but for those that are `held` in others.
    """
    plan: list[WeightBucket] = []
    entries: list[BucketEntry] = []
    end = 0
    for spec in specs:
        kept = cast_dtype(spec.name, spec.dtype, dtype, held or {})
        entry = BucketEntry(spec.name, spec.shape, str(kept).removeprefix("torch."), end)
        if entries and end + entry.num_bytes > bucket_bytes:
            plan.append(WeightBucket(tuple(entries), end))
            entries, end = [], 0
            entry = BucketEntry(entry.name, entry.shape, entry.dtype, 0)
        entries.append(entry)
        end += -(-entry.num_bytes // _ALIGNMENT) * _ALIGNMENT
    if entries:
        plan.append(WeightBucket(tuple(entries), end))
    return plan


def write_bucket(engine: Engine, bucket: WeightBucket, buffer: npt.NDArray[np.uint8] | None) -> int:
    """Gather a bucket's weights and, where a buffer is given, lay them into it. Every rank calls it.

    The buffer has at least ``bucket.num_bytes`` bytes; ranks without one only take part in the gathering.
    Returns:
        CRC-32 of the bucket's bytes; 0 without a buffer.
    Raises:
        WeightsError: the engine gives something else than the plan says.
    Collectives: those of `Engine.full_weights`.
    """
    gathered = engine.full_weights([entry.name for entry in bucket.entries])
    if buffer is None:
        deque(gathered, maxlen=0)
        return 0
    flat = torch.from_numpy(buffer)
    for entry in bucket.entries:  # not in a zip, which would keep a weight alive while the next is gathered
        name, tensor = next(gathered, ("nothing", None))
        if tensor is None or name != entry.name or tuple(tensor.shape) != entry.shape:
            found = name if tensor is None else f"{name} of shape {tuple(tensor.shape)}"
            raise WeightsError(f"the engine gave {found} where its plan has {entry.name} of shape {entry.shape}")
        entry.view(flat).copy_(tensor)
        del tensor
    deque(gathered, maxlen=0)
    starts = [entry.offset for entry in bucket.entries]
    for entry, next_start in zip(bucket.entries, [*starts[1:], bucket.num_bytes], strict=True):
        buffer[entry.offset + entry.num_bytes : next_start] = 0  # padding counts in the checksum too
    return zlib.crc32(buffer[: bucket.num_bytes].data)


def read_bucket(
    buffer: npt.NDArray[np.uint8], bucket: WeightBucket, checksum: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Check a bucket's bytes, then yield its tensors as views into the buffer.

    A WeightsError where the bytes are too few, or not those that were written.
    """
    if len(buffer) < bucket.num_bytes:
        raise WeightsError(f"a weight bucket of {bucket.num_bytes} bytes arrived with only {len(buffer)}")
    found = zlib.crc32(buffer[: bucket.num_bytes].data)
    if found != checksum:
        names = f"{bucket.entries[0].name} … {bucket.entries[-1].name}"
        raise WeightsError(
            f"weight bucket {names} arrived with checksum {found:#010x}, but {checksum:#010x} was written"
        )
    yield from bucket.views(torch.from_numpy(buffer)).items()


def combine_checksums(checksums: Sequence[int]) -> int:
    """Return one CRC-32 for a whole set of weights from those of its buckets, in order."""
    *_, combined = accumulate(checksums, lambda crc, part: zlib.crc32(part.to_bytes(4, "little"), crc), initial=0)
    return combined


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
