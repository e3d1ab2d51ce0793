"""The process group of this process: one for all workers, such as an actor, its reference policy and a critic."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import torch.distributed as dist

from verl_engine.contract.errors import ConfigError
from verl_engine.engine.device import Device


@dataclass(frozen=True, slots=True)
class DataParallel:
    """This rank's index among the ranks that hold different data."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    """None only where there is a single rank and no process group."""


@dataclass(eq=False, slots=True)
class SharedGroup:
    """The process group that workers of this process use together, whoever started it."""

    world: dist.ProcessGroup
    is_started_here: bool
    num_users: int = 0
    made: list[dist.ProcessGroup] = field(default_factory=list)
    """Further groups, which engines made."""
    _current: ClassVar[SharedGroup | None] = None

    @classmethod
    def join(
        cls, device: Device, init_method: str | None, rank: int, world_size: int, timeout_s: float
    ) -> tuple[SharedGroup, bool]:
        """Start the process group, or use the one that there is, which keeps its own time limit.

        Returns:
            The group, to be left once, and whether this is its first user.
        Raises:
            ConfigError: there is a group of another size, rank or backend; or there is none, and no `init_method`.
        """
        is_started_here = not dist.is_initialized()
        if not is_started_here:
            _require_fit(device, rank, world_size)
        elif init_method is None:
            raise ConfigError(
                "this process is in no process group, and the worker was not told how to join one: give prepare an "
                "init_method, such as tcp://10.0.0.1:29500, or call torch.distributed.init_process_group before"
            )
        else:
            timeout = datetime.timedelta(seconds=timeout_s)
            dist.init_process_group(
                device.collectives, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
            )
        world = dist.group.WORLD
        assert world is not None
        if cls._current is None or cls._current.world is not world:
            cls._current = cls(world, is_started_here)
        cls._current.num_users += 1
        return cls._current, cls._current.num_users == 1

    @contextmanager
    def owning(self) -> Iterator[None]:
        """Let those that use the process group own the further groups that are made inside, such as device meshes'."""
        before = process_groups()
        try:
            yield
        finally:
            self.made += [group for group in process_groups() if group not in before]

    def leave(self) -> None:
        """End what the users of the group have made, if this is the last of them.

        In a group of somebody else only those of the engines end.
        """
        self.num_users -= 1
        if self.num_users:
            return
        made, self.made = self.made, []
        if not dist.is_initialized() or self.world is not dist.group.WORLD:
            return  # somebody ended it, and all others with it
        if self.is_started_here:
            dist.destroy_process_group()
        else:
            for group in made:
                if is_alive(group):
                    dist.destroy_process_group(group)


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a process group was not ended yet."""
    return group in process_groups()


def process_groups() -> tuple[dist.ProcessGroup, ...]:
    """Return all groups that this process is in, in the order in which they were made."""
    return tuple(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - torch has no public list of them


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
