"""Whether weights are those of a snapshot: by a checksum of all, or by a sample."""

import zlib
from collections.abc import Mapping
from typing import Final

import torch

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes an element."""


def weights_checksum(weights: Mapping[str, torch.Tensor]) -> int:
    """Compute the CRC-32 over names and bytes, in order of the names, of contiguous tensors on the CPU."""
    crc = 0
    for name in sorted(weights):
        content = weights[name].reshape(-1).view(torch.uint8).numpy().data
        crc = zlib.crc32(content, zlib.crc32(name.encode(), crc))
    return crc


def spread_sample(weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Take a few numbers of every weight, spread over it, as bit patterns: [n] int64 on the CPU.

    They are equal for equal weights. At most 7 numbers a dim, so this takes milliseconds.
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
