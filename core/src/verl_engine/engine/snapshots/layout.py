"""Where each weight lies in one flat buffer: the manifest of a snapshot."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

_ALIGNMENT: Final = 64
"""Bytes: a cache line, and more than any dtype or vector instruction asks for."""


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One weight in the buffer; always contiguous there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """In bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """All weights of a snapshot. Equal layouts can use each other's memory."""

    entries: tuple[ManifestEntry, ...]
    num_bytes: int
    """Of the whole buffer, the gaps between weights included."""

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor]) -> Layout:
        """Lay weights out one after the other, in their order."""
        entries = []
        end = 0
        for name, tensor in weights.items():
            entries.append(ManifestEntry(name, tuple(tensor.shape), tensor.dtype, end))
            end += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(entries), end)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Look at a buffer as the weights it holds, without a copy.

        Args:
            buffer: [num_bytes] uint8, or longer.
        """
        views = {}
        for entry in self.entries:
            size = entry.dtype.itemsize
            for dim in entry.shape:
                size *= dim
            views[entry.name] = buffer[entry.offset : entry.offset + size].view(entry.dtype).view(entry.shape)
        return views


def weights_checksum(weights: Mapping[str, torch.Tensor]) -> int:
    """Compute the CRC-32 over names and bytes, in order of the names.

    Args:
        weights: contiguous, on the CPU.
    """
    crc = 0
    for name in sorted(weights):
        content = weights[name].reshape(-1).view(torch.uint8).numpy().data
        crc = zlib.crc32(content, zlib.crc32(name.encode(), crc))
    return crc


def spread_sample(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Take a few numbers of every weight, spread over it, as bit patterns.

    Returns:
        [n] int64 on the CPU; equal for equal weights. At most 7 numbers a dim, so this takes milliseconds.
    """
    samples = []
    for tensor in weights.values():
        sample = tensor.detach()[tuple(slice(None, None, max(1, size // 4)) for size in tensor.shape)]
        if sample.dtype.is_complex:
            sample = torch.view_as_real(sample)
        samples.append(sample.view(_INTEGERS[sample.element_size()]).reshape(-1).to(torch.int64))
    if len({sample.device for sample in samples}) > 1:
        samples = [sample.cpu() for sample in samples]
    return torch.cat(samples).cpu() if samples else torch.zeros(0, dtype=torch.int64)


_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes an element."""
