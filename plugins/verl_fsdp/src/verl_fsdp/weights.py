"""Whole weights out of a sharded model, one by one."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_engine.engine.base import WeightSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import torch
    from transformers import PreTrainedModel


def weight_specs(model: PreTrainedModel, parameters: Mapping[str, torch.Tensor]) -> list[WeightSpec]:
    """List every weight that a Hugging Face folder holds: parameters, tied ones once, and persistent buffers."""
    return [
        WeightSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in _exported(model, parameters).items()
    ]


def full_weights(
    model: PreTrainedModel, parameters: Mapping[str, torch.Tensor], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Gather weights one by one; each is valid until the next is taken. Collectives: an all-gather for each."""
    exported = _exported(model, parameters)
    for name in names:
        tensor = exported[name].detach()
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_pretrained(
    model: PreTrainedModel, parameters: Mapping[str, torch.Tensor], folder: Path, *, is_writer: bool
) -> None:
    """Write a Hugging Face folder; it appears under its name only when it is whole.

    Collectives: an all-gather a weight, then a barrier, so that on return the folder is there for every rank.
    """
    exported = _exported(model, parameters)
    state = {}
    for name, tensor in full_weights(model, parameters, list(exported)):
        if is_writer:
            state[name] = tensor.cpu().clone()
    if is_writer:
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        model.save_pretrained(partial, state_dict=state)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    dist.barrier()


def _exported(model: PreTrainedModel, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Map names to shards (or whole buffers), in the model's own order."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**parameters, **buffers}
