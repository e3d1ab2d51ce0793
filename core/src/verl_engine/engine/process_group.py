"""The process group of this process: one for all workers, such as an actor and its reference policy."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from verl_engine.engine.device import Device


class _Started:
    """The group that a worker of this process started, and how many use it."""

    group: Any = None
    num_users = 0


def join_process_group(device: Device, init_method: str, rank: int, world_size: int, timeout_s: float) -> None:
    """Start the process group, or use the one that there is, whoever started it.

    Args:
        device: of this rank; says which collectives are needed.
        init_method: of torch.distributed; not used where there is a group.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: for joining, and for each collective later; where there is a group, it keeps its own.
    Raises:
        ConfigError: there is a group of another size, rank or backend.
    """
    if dist.is_initialized():
        _require_fit(device, rank, world_size)
    else:
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group(
            device.collectives, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
        )
        _Started.group, _Started.num_users = dist.group.WORLD, 0
    if _Started.group is dist.group.WORLD:
        _Started.num_users += 1


def leave_process_group() -> None:
    """End the process group, if a worker started it and no other one uses it; whoever called `join_process_group`."""
    if not dist.is_initialized() or _Started.group is not dist.group.WORLD:
        return
    _Started.num_users -= 1
    if _Started.num_users == 0:
        dist.destroy_process_group()
        _Started.group = None


def _require_fit(device: Device, rank: int, world_size: int) -> None:
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    found = (dist.get_rank(), dist.get_world_size(), backends.get(device.kind))
    wanted = (rank, world_size, device.collectives)
    if found != wanted:
        raise ConfigError(
            f"this process is in a process group already, as {_text(*found)}; this worker needs {_text(*wanted)}. All "
            "workers of a process share one group: give them the same rank, world_size and engine.device, or processes "
            "of their own"
        )


def _text(rank: int, world_size: int, backend: str | None) -> str:
    return f"rank {rank} of {world_size} over {backend}"
