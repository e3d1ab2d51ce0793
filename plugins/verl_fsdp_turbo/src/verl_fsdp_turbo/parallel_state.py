"""The library's division of the ranks, of which a process has one: made before others can, and checked.

A second call with other sizes is ignored by the library silently, and so is a first one after somebody only
looked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from verl_engine.contract.errors import ConfigError, PluginError, UnsupportedError
from verl_engine.engine.base import DataParallel

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.device_mesh import DeviceMesh

    from verl_fsdp_turbo.library import Library

_AXES: Final = {
    "fully_shard_parallel_size": "fsdp",
    "tensor_parallel_size": "tp",
    "kv_allgather_parallel_size": "kvallgather",
    "ulysses_parallel_size": "ulysses",
    "expert_parallel_size": "ep",
    "expert_fully_shard_parallel_size": "efsdp",
}
"""Each size of the config, and the library's name of the mesh axis that has it."""


@dataclass(frozen=True, slots=True)
class _Made:
    sizes: Mapping[str, int]
    world: object
    """The process group of all ranks: meshes over one that is gone are of no use."""


_made: list[_Made] = []
"""None or one, as the library has none or one."""


@dataclass(frozen=True, slots=True)
class RankDivision:
    """Who shares what, of the library's groups."""

    state: Any

    @property
    def weights(self) -> DeviceMesh:
        """Axis ``dp``: copies of the weights; axis ``fsdp``: the ranks that share one."""
        mesh: DeviceMesh = self.state.get_device_mesh("dp_fsdp")
        return mesh

    @property
    def ulysses(self) -> dist.ProcessGroup | None:
        """Ranks that split a sequence by the library's means; None where nobody does."""
        if not self.state.is_group_enable("ulysses"):
            return None
        group: dist.ProcessGroup = self.state.get_group("ulysses")
        return group

    @property
    def data_parallel(self) -> DataParallel:
        """This rank's shard of the data. Newer releases have a mesh for it, which must agree with the older ones'."""
        # Older releases have only this, of the ranks that hold different sequences.
        axis = "data" if hasattr(self.state, "get_data_group") else "cdp"
        state = self.state
        return DataParallel(state.get_rank(axis), state.get_group_size(axis), state.get_group(axis))


def divide_ranks(library: Library, values: Mapping[str, Any]) -> RankDivision:
    """Make the division, or take the one that this process has if it is the same.

    Args:
        library: as installed.
        values: of its config.
    Raises:
        UnsupportedError: the process has another one.
        PluginError: somebody else made one, which does not fit.
        ConfigError: the sizes do not divide the ranks.
    Collectives: those of new device meshes.
    """
    if not dist.is_initialized():
        raise PluginError("fsdp_turbo would start a process group of its own, over hccl: start one before the engine")
    world = dist.group.WORLD
    sizes = {name: size for name, size in values["distributed"].items() if name.endswith("_size")}
    if _made and _made[0].world is not world:
        _forget(library)
    if _made and dict(_made[0].sizes) != dict(sizes):
        raise UnsupportedError(
            f"this process has an engine for which fsdp_turbo divided the ranks as {_text(_made[0].sizes)}, and it "
            f"knows one division per process: it would go on with it, silently, instead of {_text(sizes)}. Give "
            "both engines the same sizes, or each a process of its own"
        )
    try:
        state = library.state.init_parallel_state(library.build_config(values))
    except AssertionError as error:
        raise ConfigError(
            f"fsdp_turbo cannot divide {dist.get_world_size()} ranks as {_text(sizes)}: {error}"
        ) from error
    found = {size: state.get_group_size(axis) for size, axis in _AXES.items()}
    if found != dict(sizes):
        raise PluginError(
            f"fsdp_turbo's division of the ranks was made by somebody else before this engine, as {_text(found)}, and "
            f"cannot be made again as {_text(sizes)}: a call of get_parallel_state() is enough for that. Build the "
            "engine first"
        )
    if not _made:
        _made.append(_Made(dict(sizes), world))
    return RankDivision(state)


def _forget(library: Library) -> None:
    """Drop a division over a process group that is gone.

    Raises:
        UnsupportedError: this release of the library cannot.
    """
    if not library.can_reset:
        raise UnsupportedError(
            "the process group was started anew, and this release of fsdp_turbo keeps its meshes over the old one; a "
            "newer one has reset_parallel_state. Start a fresh process"
        )
    library.state.reset_parallel_state()
    _made.clear()


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "all sizes 1"
