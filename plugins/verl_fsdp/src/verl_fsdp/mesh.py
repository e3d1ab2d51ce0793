"""How the ranks are divided: who shares a copy of the weights, who has the same data, who splits a sequence."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_engine.engine.base import DataParallel
from verl_fsdp.config import Fsdp2Config, FsdpConfig, ShardedConfig


@dataclass(frozen=True, slots=True)
class Meshes:
    """The meshes of one engine; every rank is in each."""

    weights: DeviceMesh
    """Axis ``shard``: the ranks that share one copy; before it, with ``shard_ranks``, axis ``replicate``."""
    data_parallel: DataParallel
    sequence: dist.ProcessGroup | None
    """Ranks that split the tokens of a micro-batch among them; None where nobody does."""


def build_meshes(config: Fsdp2Config | FsdpConfig, device_kind: str) -> Meshes:
    """Divide the ranks of the process group as configured; ConfigError where that does not come out even.

    Collectives: those of new device meshes.
    """
    world_size = dist.get_world_size()
    config.validate_world(world_size)
    if config.shard_ranks in (None, world_size):
        weights = init_device_mesh(device_kind, (world_size,), mesh_dim_names=("shard",))
    else:
        shape = (world_size // config.shard_ranks, config.shard_ranks)
        weights = init_device_mesh(device_kind, shape, mesh_dim_names=("replicate", "shard"))
    return divide_data(config, device_kind, weights)


def divide_data(config: ShardedConfig, device_kind: str, weights: DeviceMesh) -> Meshes:
    """Give each rank a shard of the data, or a part of one; `weights` says who shares a copy of the weights.

    Collectives: those of a new device mesh, if there is one.
    """
    world_size = dist.get_world_size()
    if config.sequence_parallel_size == 1:
        return Meshes(weights, DataParallel(dist.get_rank(), world_size, dist.group.WORLD), None)
    shape = (world_size // config.sequence_parallel_size, config.sequence_parallel_size)
    data = init_device_mesh(device_kind, shape, mesh_dim_names=("data", "sequence"))
    own = DataParallel(data.get_local_rank("data"), shape[0], data.get_group("data"))
    return Meshes(weights, own, data.get_group("sequence"))
