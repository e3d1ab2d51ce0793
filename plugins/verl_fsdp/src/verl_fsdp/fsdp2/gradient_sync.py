"""Gradients under fully_shard: when they are reduced, and how they are forgotten."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

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
