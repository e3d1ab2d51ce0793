"""The library's division of the ranks: made before others can, and checked.

The library has one per process: a second call with other sizes is ignored silently, and so is a first one after
somebody only looked. So each engine's is put in place while that engine runs.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_engine.contract.errors import ConfigError, PluginError, UnsupportedError
from verl_engine.engine.base import DataParallel
from verl_engine.engine.process_group import is_alive
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
class RankDivision:
    """Who shares what, of the library's groups."""

    library: Library
    state: Any
    sizes: Mapping[str, int]
    """By the library's names of its config's fields."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the library's functions find this division inside, whichever was made last."""
        current = self.library.state.get_parallel_state()
        if current is self.state:
            yield
            return
        before = dict(vars(current))
        vars(current).clear()
        vars(current).update(vars(self.state))
        try:
            yield
        finally:
            vars(current).clear()
            vars(current).update(before)

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


_made: list[RankDivision] = []
"""Those of this process. The library knows the newest only."""


def divide_ranks(library: Library, values: Mapping[str, Any]) -> RankDivision:
    """Make the division, or take one that this process has if it is the same.

    Raises:
        UnsupportedError: the process has another one, and this release of the library can make one only.
        PluginError: somebody else made one, which does not fit.
        ConfigError: the sizes do not divide the ranks.
    Collectives: those of new device meshes.
    """
    if not dist.is_initialized():
        raise PluginError("fsdp_turbo would start a process group of its own, over hccl: start one before the engine")
    sizes = {name: size for name, size in values["distributed"].items() if name.endswith("_size")}
    before = _made[:]
    _made[:] = [division for division in before if is_alive(division.state.get_group("fsdp"))]
    for division in _made:
        if division.sizes == sizes:
            return division
    if before and not library.can_reset:
        raise UnsupportedError(
            f"fsdp_turbo has divided the ranks of this process as {_text(before[-1].sizes)}, and this release of it "
            f"cannot divide them anew, as {_text(sizes)}: it would go on with what it has, silently. Give all engines "
            "of a process the same sizes and process group, or each a process of its own; newer releases have "
            "reset_parallel_state"
        )
    if before:
        library.state.reset_parallel_state()
    try:
        state = library.state.init_parallel_state(library.build_config(values))
    except AssertionError as error:
        raise ConfigError(
            f"fsdp_turbo cannot divide {dist.get_world_size()} ranks as {_text(sizes)}: {error}"
        ) from error
    found = {size: state.get_group_size(axis) for size, axis in _AXES.items()}
    if found != sizes:
        raise PluginError(
            f"fsdp_turbo's division of the ranks was made by somebody else before this engine, as {_text(found)}, and "
            f"cannot be made again as {_text(sizes)}: a call of get_parallel_state() is enough for that. Build the "
            "engine first"
        )
    _made.append(RankDivision(library, state, sizes))
    return _made[-1]


def _text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "all sizes 1"
