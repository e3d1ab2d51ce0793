"""Sharded weights: where each rank's shard lies, which ranks hold it, and full weights from all ranks' shards."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from verl_engine.contract.errors import UnsupportedError, WeightsError
from verl_engine.engine.base import WeightShard, WeightSpec


def offsets_and_shape(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Say where this rank's shard of a weight begins, and its shape; a plain tensor is the full weight.

    An UnsupportedError where what the ranks hold is to be summed, not laid side by side.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        raise UnsupportedError(f"a weight with placements {tensor.placements} has no shard here, only a partial sum")
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(shape)


def replicas_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], bool]:
    """Return ``replicas`` and ``is_replica`` of a `WeightShard`: which ranks of the world hold the same shard.

    The weight is plain, and then every rank has all of it, or a DTensor over a mesh of all ranks. No collectives.
    """
    if not dist.is_initialized():
        return (), False
    if not isinstance(tensor, DTensor):
        return shared_by(range(dist.get_world_size()), tensor.numel())
    mesh = tensor.device_mesh
    own = mesh.get_coordinate()
    assert own is not None, "a rank has shards only of meshes that it is in"
    places = zip(tensor.placements, own, strict=True)
    index = tuple(slice(None) if placement.is_replicate() else coordinate for placement, coordinate in places)
    return shared_by(mesh.mesh[index].flatten().tolist(), tensor.to_local().numel())


def shared_by(ranks: Iterable[int], num_elements: int) -> tuple[tuple[int, ...], bool]:
    """Return ``replicas`` and ``is_replica`` of a shard that some ranks hold; an empty one has none."""
    holders = tuple(sorted(ranks))
    if len(holders) < 2 or not num_elements:  # noqa: PLR2004 - this rank alone
        return (), False
    return holders, holders[0] != dist.get_rank()


def shard_of(whole: torch.Tensor, offsets: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """View a part of a whole tensor by offsets and shape; no copy."""
    for dim, (offset, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)  # an empty part may lie beyond the end
    return whole


def assemble_weights(specs: Iterable[WeightSpec], shards: Iterable[WeightShard]) -> Iterator[tuple[str, torch.Tensor]]:
    """Put full weights together, from the shards of all ranks.

    Args:
        specs: the weights wanted, of the engine's `weight_specs`.
        shards: of all ranks, in any order; what several ranks hold may come more than once.
    Yields:
        Each weight under its name, in the order of the specs, on the CPU.
    Raises:
        WeightsError: shards do not cover a weight, or do not fit it.
    """
    parts: dict[str, list[WeightShard]] = {}
    for shard in shards:
        parts.setdefault(shard.name, []).append(shard)
    for spec in specs:
        yield spec.name, _whole(spec, parts.pop(spec.name, []))
    if parts:
        raise WeightsError(f"shards came of weights that nobody asked for: {', '.join(sorted(parts)[:5])}")


def _whole(spec: WeightSpec, parts: list[WeightShard]) -> torch.Tensor:
    view_shape = parts[0].view_shape if parts else spec.shape
    if prod(view_shape) != prod(spec.shape) or any(part.view_shape != view_shape for part in parts):
        views = sorted({part.view_shape for part in parts})
        raise WeightsError(f"shards of {spec.name}, of shape {spec.shape}, are shards of a weight of shape {views}")
    whole = torch.empty(view_shape, dtype=spec.dtype)
    is_there = torch.zeros(view_shape, dtype=torch.bool)
    for part in parts:
        has_dims = len(part.offsets) == part.tensor.ndim == len(view_shape)
        places = zip(part.offsets, part.tensor.shape, view_shape, strict=has_dims)
        is_inside = all(start >= 0 and start + size <= end for start, size, end in places)
        if not has_dims or (part.tensor.numel() and not is_inside):
            raise WeightsError(
                f"a shard of {spec.name} of shape {tuple(part.tensor.shape)} at {part.offsets} does not lie in a "
                f"weight of shape {view_shape}"
            )
        shard_of(whole, part.offsets, part.tensor.shape).copy_(part.tensor)
        shard_of(is_there, part.offsets, part.tensor.shape).fill_(True)
    if not is_there.all():
        gap = (~is_there).nonzero()
        raise WeightsError(
            f"the shards of {spec.name} leave {len(gap)} of {prod(spec.shape)} elements out, the first at "
            f"{tuple(gap[0].tolist())} of {view_shape}; take the shards of every rank"
        )
    return whole.view(spec.shape)
