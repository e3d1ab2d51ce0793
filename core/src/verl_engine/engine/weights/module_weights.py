"""Weights in and out of a torch module, whose tensors are plain or sharded (DTensor): full, or each rank's shard.

Shape legend: O outputs and I inputs of a layer, R the rank of an adapter.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_engine.contract.errors import UnsupportedError, WeightsError
from verl_engine.engine.base import WeightSpec


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to a weight: ``scale * b @ a``."""

    a_RI: torch.Tensor  # noqa: N815 - shape suffix
    b_OR: torch.Tensor  # noqa: N815 - shape suffix
    scale: float


@dataclass(frozen=True, slots=True)
class Exported:
    """One weight as the world outside sees it."""

    tensor: torch.Tensor
    """A parameter or buffer of the module."""
    low_rank: LowRank | None = None
    """What an adapter adds to it."""


def exported_tensors(model: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> dict[str, Exported]:
    """Take what a Hugging Face folder holds, in its order: parameters, tied ones once, and persistent buffers."""
    persistent = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {name: Exported(tensor) for name, tensor in {**parameters, **buffers}.items()}


def weight_specs(exported: Mapping[str, Exported]) -> list[WeightSpec]:
    """List names, shapes and dtypes."""
    return [WeightSpec(name, tuple(entry.tensor.shape), entry.tensor.dtype) for name, entry in exported.items()]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor, detached. Collectives: an all-gather where it is sharded."""
    whole = tensor.detach()
    if not isinstance(whole, DTensor):
        return whole
    device = whole.device_mesh.device_type
    # Shards that were moved to the CPU, or stay there, cannot be gathered by an accelerator's collectives.
    return (whole if whole.device.type == device else cast("DTensor", whole.to(device))).full_tensor()


def merged(base_OI: torch.Tensor, low_rank: LowRank) -> torch.Tensor:
    """Add what an adapter adds to a weight, or to the same part of it; in float32, then in the weight's dtype.

    The weight stays as it is. Of a part, `low_rank` has the rows of B and the columns of A that belong to it.
    """
    merged_OI = low_rank.b_OR.float() @ low_rank.a_RI.float()
    return merged_OI.mul_(low_rank.scale).add_(base_OI).to(base_OI.dtype)


def local_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield this rank's shard of each tensor, live and detached."""
    return ((name, local_tensor(tensor)) for name, tensor in named)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor, live and detached."""
    live = tensor.detach()
    return live.to_local() if isinstance(live, DTensor) else live


def own_tensors(exported: Mapping[str, Exported]) -> dict[str, torch.Tensor]:
    """Return what takes weights that come in, by name; an UnsupportedError where there are adapters."""
    if any(entry.low_rank for entry in exported.values()):
        raise UnsupportedError(
            "engine.lora: full weights cannot be told apart into the model's own and the adapter's; start an engine "
            "from a folder that holds them"
        )
    return {name: entry.tensor for name, entry in exported.items()}


def kept_by_first_rank(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copy full weights to the CPU on the first rank; the others only take part in their gathering."""
    kept = {}
    for name, tensor in weights:
        if is_first_rank():
            kept[name] = tensor.to("cpu", copy=True)
        del tensor
    return kept


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Let the first rank write a folder; it takes the place of what was there only when it is whole.

    On return it is there for every rank, or every rank raises, so none waits for one that could not write.
    Raises:
        WeightsError: on the other ranks, where the first one failed.
    Collectives: a broadcast.
    """
    failure: Exception | None = None
    if is_first_rank():
        try:
            _replace(folder, write)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must know of it; it is raised below
            failure = error
    if dist.is_initialized():
        told = [None if failure is None else f"{type(failure).__name__}: {failure}"]
        dist.broadcast_object_list(told, src=0)
        if told[0] is not None and failure is None:
            raise WeightsError(f"the first rank could not write {folder}: {told[0]}")
    if failure is not None:
        raise failure


def _replace(folder: Path, write: Callable[[Path], object]) -> None:
    partial, former = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("tmp", "former.tmp"))
    shutil.rmtree(partial, ignore_errors=True)
    try:
        write(partial)
        shutil.rmtree(former, ignore_errors=True)
        if folder.is_dir():
            folder.rename(former)
        partial.rename(folder)
        shutil.rmtree(former, ignore_errors=True)
    finally:  # where the disk is full, others need the room
        shutil.rmtree(partial, ignore_errors=True)


def is_first_rank() -> bool:
    """Whether this rank writes: of all ranks, not of those with different data, for then several may be the first."""
    return not dist.is_initialized() or dist.get_rank() == 0
