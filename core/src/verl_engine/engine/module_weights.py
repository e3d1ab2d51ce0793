"""Whole weights in and out of a torch module, whose tensors are plain or sharded (DTensor)."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.base import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path


def weight_specs(model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> list[WeightSpec]:
    """List every weight that a Hugging Face folder holds: parameters, tied ones once, and persistent buffers."""
    return [
        WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in _exported(model, parameters).items()
    ]


def full_weights(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather weights one by one; each is valid until the next is taken.

    Collectives: an all-gather for each sharded one.
    """
    exported = _exported(model, parameters)
    for name in names:
        tensor = exported[name].detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's shard of each tensor, live and detached."""
    for name, tensor in named:
        live = tensor.detach()
        yield name, live.to_local() if isinstance(live, DTensor) else live


def load_full_weights(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Copy whole weights into the shards, in place; each rank keeps its own part.

    Raises:
        WeightsError: a name or shape that the model does not have, or a weight that is missing.
    Collectives: a scatter from the first rank for each sharded weight.
    """
    missing = _exported(model, parameters)
    for name, whole in weights:
        own = missing.pop(name, None)
        if own is None or own.shape != whole.shape:
            found = "no such weight, or had it already" if own is None else f"shape {tuple(own.shape)}"
            raise WeightsError(f"weight {name} of shape {tuple(whole.shape)} does not fit: the model has {found}")
        live = own.detach()
        value = whole.to(device=live.device, dtype=live.dtype)
        if isinstance(live, DTensor):
            value = distribute_tensor(value, live.device_mesh, live.placements)
        live.copy_(value)
    if missing:
        raise WeightsError(f"{len(missing)} weights are missing: {', '.join(sorted(missing)[:5])}")


def save_pretrained(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], folder: Path, *, is_writer: bool
) -> None:
    """Write a Hugging Face folder; it appears under its name only when it is whole.

    Args:
        model: has transformers' ``save_pretrained``.
        parameters: this rank's, by name.
        folder: replaced if it exists.
        is_writer: whether this rank writes.
    Collectives: an all-gather a weight, then a barrier, so that on return the folder is there for every rank.
    """
    exported = _exported(model, parameters)
    state = {}
    for name, tensor in full_weights(model, parameters, list(exported)):
        if is_writer:
            state[name] = tensor.cpu().clone()
    if is_writer:
        partial = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            cast("Any", model).save_pretrained(partial, state_dict=state)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
        finally:  # where the disk is full, others need the room
            shutil.rmtree(partial, ignore_errors=True)
    if dist.is_initialized():
        dist.barrier()


def _exported(model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Map names to shards (or whole buffers), in the model's own order."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**parameters, **buffers}
