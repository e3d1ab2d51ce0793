"""FSDP1's flat tensors on the CPU and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from verl_engine.engine.offload import GradientSlot, Offload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_engine.engine.device import Device
    from verl_fsdp.fsdp1.flat_unit import FlatUnit


class FlatOffload(Offload):
    """Moves shards as wholes: ``module.to`` would leave FSDP1's own references to them behind, on the device."""

    def __init__(
        self,
        root: torch.nn.Module,
        units: Sequence[FlatUnit],
        optimizer: torch.optim.Optimizer | None,
        device: Device,
    ) -> None:
        """Begin with everything on the device."""
        super().__init__(root, optimizer, device)
        self._units = units
        self._root = root

    def _move_module(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Move each unit's shard, and the buffers; those that modules share stay shared."""
        for unit in self._units:
            unit.replace_local(copy(unit.local))
        for buffer in self._root.buffers():
            buffer.data = copy(buffer.detach())


class FlatGradientSlot(GradientSlot):
    """A unit's gradient: reduced, or unreduced and whole. The parameters' own are views of it."""

    @property
    def _flat(self) -> Any:
        return self.holder.flat_param

    def get(self) -> torch.Tensor | None:
        """Look."""
        gradient: torch.Tensor | None = self._flat.grad
        return gradient

    def set(self, gradient: torch.Tensor | None) -> None:
        """Put one in, or None, and let the parameters' own follow."""
        flat = self._flat
        flat.grad = None
        if gradient is not None:
            flat.grad = torch.empty_like(flat)
            flat.grad.data = gradient  # an unreduced one is larger than the shard, which an assignment refuses
        is_whole = gradient is not None and gradient.shape == flat._unpadded_unsharded_size  # noqa: SLF001
        if is_whole or not self.holder.uses_sharded_strategy:
            self.holder._use_unsharded_grad_views()  # noqa: SLF001
        else:
            self.holder._use_sharded_grad_views()  # noqa: SLF001

    def takes(self, gradient: torch.Tensor) -> bool:
        """Whether its device is that of the weights."""
        return bool(self._flat.device == gradient.device)
