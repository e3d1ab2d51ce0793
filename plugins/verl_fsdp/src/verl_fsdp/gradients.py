"""Gradients under fully_shard: when they are reduced, how they are forgotten, their norm over all ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@contextmanager
def gradient_sync(model: FSDPModule, *, reduce: bool) -> Iterator[None]:
    """Reduce gradients in the backward inside, or hold each rank's own back in float32.

    Afterwards reduction is on again, also after an exception.
    """
    model.set_requires_gradient_sync(reduce)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def forget_gradients(model: FSDPModule, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop every gradient, those of an unfinished accumulation too.

    ``zero_grad`` sees sharded gradients only. What a backward without reduction held back lies in the unsharded
    parameters, and would be added to the next accumulation when this one was abandoned: its gradient would count twice.
    """
    for parameter in parameters:
        parameter.grad = None
    for fsdp_param in _fsdp_params(model):
        fsdp_param.unsharded_accumulated_grad = None
        unsharded = getattr(fsdp_param, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None


def recover_from_abandoned_pass(model: FSDPModule) -> None:
    """Bring fully_shard's bookkeeping back to where a forward may begin, after an exception in the middle of a pass."""
    # Newer releases of torch have a call for it; in older ones the next forward of the root does the same.
    reset = getattr(model, "reset_iter_state", None)
    if reset is not None:
        reset()
    for module in _fsdp_modules(model):
        module.reshard()


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


def _fsdp_modules(model: FSDPModule) -> Iterator[FSDPModule]:
    """Yield every module that fully_shard was applied to."""
    assert isinstance(model, torch.nn.Module)
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _fsdp_params(model: FSDPModule) -> Iterator[Any]:
    """Yield fully_shard's private record of each parameter."""
    for module in _fsdp_modules(model):
        state = module._get_fsdp_state()  # noqa: SLF001 - what holds back gradients has no public access
        # torch 2.13 keeps a list of groups, earlier releases one.
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [state._fsdp_param_group] if groups is None else groups:  # noqa: SLF001
            if group is not None:
                yield from group.fsdp_params
