"""The division of the ranks: one a process, whatever is asked for later."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_turbo.release import HAS
from fsdp_turbo.utils.device import get_accelerator_name

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_instances: list[ParallelState] = []


class ParallelState:
    """Meshes by name."""

    def __init__(self, fsdp: int = 1, ulysses: int = 1, kvallgather: int = 1, ep: int = 1, efsdp: int = 1) -> None:
        """Make them."""
        if not dist.is_initialized():
            dist.init_process_group("hccl")
        self.device_mesh_map: dict[str, DeviceMesh] = {}
        self.fully_shard_parallel_size, self.tensor_parallel_size = fsdp, 1
        self.ulysses_parallel_size, self.kv_allgather_parallel_size = ulysses, kvallgather
        self.expert_parallel_size, self.expert_fully_shard_parallel_size = ep, efsdp
        self._add(("dp", "fsdp", "tp"), (fsdp, 1))
        self._add(("edp", "efsdp", "ep"), (efsdp, ep))
        self._add(("cdp", "kvallgather", "ulysses", "tp"), (kvallgather, ulysses, 1))
        self.device_mesh_map["dp_fsdp"] = self.device_mesh_map["dp"]["dp", "fsdp"]
        self.device_mesh_map["edp_efsdp"] = self.device_mesh_map["edp"]["edp", "efsdp"]
        self.data_parallel_size = self.get_group_size("dp")
        self.expert_data_parallel_size = self.get_group_size("edp")
        if "data_mesh" in HAS:
            self._add(("data", "copies"), (kvallgather * ulysses,))

    def _add(self, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
        size = dist.get_world_size()
        if size % math.prod(shape):
            raise AssertionError(f"World size is not divisible by mesh group {shape}")
        mesh = init_device_mesh(get_accelerator_name(), (size // math.prod(shape), *shape), mesh_dim_names=names)
        for name in names:
            self.device_mesh_map[name] = mesh

    def get_device_mesh(self, name: str) -> DeviceMesh:
        """Return a mesh, or an axis of one."""
        mesh = self.device_mesh_map[name]
        return mesh[name] if name in (mesh.mesh_dim_names or ()) else mesh

    def get_group(self, name: str) -> dist.ProcessGroup:
        """Return this rank's group along an axis."""
        return self.device_mesh_map[name].get_group(name)

    def get_group_size(self, name: str) -> int:
        """Return its size."""
        return self.device_mesh_map[name][name].size()

    def get_rank(self, name: str) -> int:
        """Return this rank's place in it."""
        return self.device_mesh_map[name].get_local_rank(name)

    def is_group_enable(self, name: str) -> bool:
        """Whether there is more than one rank in it."""
        return name in self.device_mesh_map and self.get_group_size(name) > 1

    def __getattr__(self, attribute: str) -> Any:
        """Give ``get_X_group``, ``get_X_group_size`` and ``get_X_rank``."""
        for ending, method in (("_group_size", "get_group_size"), ("_group", "get_group"), ("_rank", "get_rank")):
            name = attribute.removeprefix("get_").removesuffix(ending)
            if attribute.startswith("get_") and attribute.endswith(ending) and name in self.__dict__["device_mesh_map"]:
                return lambda: getattr(self, method)(name)
        raise AttributeError(attribute)


def init_parallel_state(config: Any) -> ParallelState:
    """Make the one division, or return the one that there is, whatever the config says."""
    sizes = config.distributed
    return _one(
        fsdp=sizes.fully_shard_parallel_size,
        ulysses=sizes.ulysses_parallel_size,
        kvallgather=sizes.kv_allgather_parallel_size,
        ep=sizes.expert_parallel_size,
        efsdp=sizes.expert_fully_shard_parallel_size,
    )


def get_parallel_state() -> ParallelState:
    """Return it; where there is none, make one of all ones."""
    return _one()


def _one(**sizes: int) -> ParallelState:
    if not _instances:
        _instances.append(ParallelState(**sizes))
    return _instances[0]


if "reset_parallel_state" in HAS:

    def reset_parallel_state() -> None:
        """Forget it."""
        _instances.clear()
