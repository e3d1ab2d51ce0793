"""Clipping by a norm over one group: that along which the last parameter with a gradient is sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

if TYPE_CHECKING:
    from collections.abc import Iterable

calls: list[float] = []
"""Norms that were returned; a test's way to see who clipped."""


def clip_grad_norm(model: torch.nn.Module, max_norm: float, norm_type: float = 2.0, group: Any = None) -> float:
    """Clip, and return the norm before; a model that clips by itself does."""
    own: Any = getattr(model, "clip_grad_norm_", None)
    if own is not None:
        return float(own(max_norm=max_norm, norm_type=norm_type))
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = compute_grad_norm(parameters, norm_type, group)
    clip_grad_by_norm(parameters, max_norm, norm)
    calls.append(norm)
    return norm


def compute_grad_norm(parameters: Iterable[torch.nn.Parameter], norm_type: float = 2.0, group: Any = None) -> float:
    """Add up over one group."""
    total = 0.0
    last = group
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            last = group
            for dim, placement in enumerate(gradient.placements):
                if isinstance(placement, Shard):
                    last = gradient.device_mesh.get_group(dim)
                    break
        total += _local(gradient).detach().float().norm(norm_type).item() ** norm_type
    summed = torch.tensor([total])
    if last is not None:
        dist.all_reduce(summed, group=last)
    return float(summed.item() ** (1.0 / norm_type))


def clip_grad_by_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float, total_norm: float) -> None:
    """Scale down, into NaN where the norm is not finite."""
    if total_norm == 0.0 or max_norm <= 0.0 or max_norm / (total_norm + 1e-6) >= 1.0:
        return
    for parameter in parameters:
        _local(parameter.grad).mul_(max_norm / (total_norm + 1e-6))


def _local(gradient: Any) -> torch.Tensor:
    local: torch.Tensor = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local
