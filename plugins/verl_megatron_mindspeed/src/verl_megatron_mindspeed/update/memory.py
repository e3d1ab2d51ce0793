"""Flat buffers of Megatron whose memory can be given back, and taken again without breaking views of them."""

import torch

from verl_engine.engine.device import Device


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the CPU, into pinned memory where there is an accelerator; the copy may still be under way."""
    is_pinned = tensor.device.type != "cpu"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
    return copy.copy_(tensor.detach(), non_blocking=True)


class FlatMemory:
    """The memory of one flat tensor that others are views of. The views stay, and are not to be read meanwhile.

    On the CPU it is the same as on an accelerator, so that what is only right there is tested anywhere.
    """

    def __init__(self, flat: torch.Tensor, device: Device) -> None:
        """Take note of a tensor that begins its storage."""
        self.flat = flat.detach()
        self.is_away = False
        self.copy: torch.Tensor | None = None
        """What it held, on the CPU, while it is away."""
        self._device = device
        self._num_bytes = flat.untyped_storage().nbytes()

    def release(self, *, keep: bool = True) -> None:
        """Give the memory back, and `keep` what it holds; else that is not defined after `take_back`."""
        if keep:
            self.copy = to_host(self.flat)
            self._device.synchronize()
        self.flat.untyped_storage().resize_(0)
        self.is_away = True

    def take_back(self) -> None:
        """Take memory again, and fill it with what it held."""
        self.flat.untyped_storage().resize_(self._num_bytes)
        if self.copy is not None:
            self.flat.copy_(self.copy, non_blocking=True)
        self.copy = None
        self.is_away = False

    def forget(self) -> None:
        """Drop the copy."""
        self.copy = None
