"""The gradient's norm over all ranks, and clipping by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable


def grad_norm(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None) -> torch.Tensor:
    """Compute the L2 norm of the whole gradient.

    Args:
        parameters: sharded over `group` on one dim each; those without gradient count as zero.
        group: the data-parallel ranks.
    Returns:
        Scalar float32; the same on every rank, not finite if any gradient on any rank is not.
    Collectives: one all-reduce over `group`, also where this rank holds no gradient.
    """
    shards = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    filled = [shard for shard in shards if shard.numel()]
    norms = torch._foreach_norm(filled) if filled else ()  # noqa: SLF001 - torch has no public name
    device = shards[0].device if shards else torch.device("cpu")
    squares = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale all gradients down so that their norm, given, is at most `max_norm`; as torch's ``clip_grad_norm_``."""
    shards = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if shards:
        torch._foreach_mul_(shards, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _local(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
