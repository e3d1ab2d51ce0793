"""Gradients under fully_shard: when they are reduced, and how they are forgotten."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from verl_engine.engine.offload import GradientSlot
from verl_fsdp.fsdp2.abandoned_pass import groups_of, reset_pass

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


@contextmanager
def gradient_sync(
    model: FSDPModule, *, reduce: bool, keep_unsharded: bool = False, is_last: bool = True
) -> Iterator[None]:
    """Reduce gradients in the backward inside, or hold each rank's own back in float32.

    Afterwards all switches are as they were, also after an exception.

    Args:
        model: the root.
        reduce: whether to.
        keep_unsharded: leave parameters gathered between forward and backward, and after the backward of any but the
            last micro-batch, so that each is gathered once an accumulation.
        is_last: whether this is the last micro-batch.
    """
    with _parameters_kept(model, is_last=is_last) if keep_unsharded else nullcontext():
        model.set_requires_gradient_sync(reduce)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


@contextmanager
def _parameters_kept(model: FSDPModule, *, is_last: bool) -> Iterator[None]:
    """Gather what is not gathered yet, and free it after the last micro-batch's backward only."""
    # The first forward of a root decides whether that reshards: let it do so before the setting is looked at.
    model._get_fsdp_state()._lazy_init()  # noqa: SLF001 - there is no public way to ask for it
    groups = list(_param_groups(model))
    # set_reshard_after_forward would do, but the number of ranks that was there before could not be put back.
    before = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)
    try:
        yield
    finally:
        for group, mesh_info in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh_info
        model.set_reshard_after_backward(True)
        model.set_is_last_backward(True)


def forget_gradients(model: FSDPModule, parameters: Iterable[torch.nn.Parameter]) -> None:
    """Drop every gradient, those of an unfinished accumulation too.

    ``zero_grad`` sees sharded gradients only. What a backward without reduction kept lies in the unsharded
    parameters, and would be added to the next accumulation when this one was abandoned: its gradient would count twice.
    """
    for parameter in parameters:
        parameter.grad = None
    for fsdp_param in _fsdp_params(model):
        fsdp_param.unsharded_accumulated_grad = None
        unsharded = getattr(fsdp_param, "_unsharded_param", None)
        if unsharded is not None:
            unsharded.grad = None


def held_gradient_slots(model: FSDPModule) -> Iterator[GradientSlot]:
    """Yield where unreduced gradients are: as they came, or in float32 where parameters are gathered otherwise."""
    for fsdp_param in _fsdp_params(model):
        yield GradientSlot(fsdp_param, "unsharded_accumulated_grad")
        unsharded = getattr(fsdp_param, "_unsharded_param", None)
        if unsharded is not None:
            yield GradientSlot(unsharded)


def recover_from_abandoned_pass(model: FSDPModule) -> None:
    """Bring fully_shard's bookkeeping back to where a forward may begin, after an exception in the middle of a pass."""
    reset_pass(model)
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: FSDPModule) -> Iterator[FSDPModule]:
    """Yield every module that fully_shard was applied to."""
    assert isinstance(model, torch.nn.Module)
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _fsdp_params(model: FSDPModule) -> Iterator[Any]:
    """Yield fully_shard's private record of each parameter."""
    for group in _param_groups(model):
        yield from group.fsdp_params


def _param_groups(model: FSDPModule) -> Iterator[Any]:
    """Yield fully_shard's private record of each set of parameters that is gathered together."""
    for module in fsdp_modules(model):
        yield from groups_of(module._get_fsdp_state())  # noqa: SLF001 - what keeps unreduced gradients has no public access
