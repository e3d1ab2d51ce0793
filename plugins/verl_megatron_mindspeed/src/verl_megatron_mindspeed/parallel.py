"""Which ranks split the model, and how: Megatron's process groups, which a process has once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from verl_engine.contract.errors import ConfigError
from verl_engine.engine.base import DataParallel

if TYPE_CHECKING:
    from verl_megatron_mindspeed.config import MegatronConfig

_SIZES: Final = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_ranks",
)


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that do something together, and this one's index among them."""

    rank: int
    size: int
    group: dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Parallel:
    """This rank's groups."""

    tensor: Group
    pipeline: Group
    context: Group
    expert: Group
    expert_tensor: Group
    data: DataParallel
    """Ranks that hold different data; those that split a sequence count as one."""

    @property
    def last_stage(self) -> int:
        """Rank in the world of the one in this pipeline that holds the last layers."""
        return dist.get_global_rank(self.pipeline.group, self.pipeline.size - 1)


@dataclass(frozen=True, slots=True)
class _Made:
    """What Megatron's groups of this process were made for."""

    sizes: dict[str, int]
    world: Any


_made: _Made | None = None


def build_groups(config: MegatronConfig) -> Parallel:
    """Make Megatron's groups, or take those that are there; every rank calls it.

    Raises:
        ConfigError: another engine of this process divides the ranks otherwise.
    Collectives: those of new groups.
    """
    global _made  # noqa: PLW0603 - Megatron's own state is one for each process
    sizes = {name: getattr(config, name) for name in _SIZES}
    world = dist.group.WORLD
    if _made is not None and _made.world is not world:  # the process group was destroyed, with Megatron's
        mpu.destroy_model_parallel()
        _made = None
    if _made is not None and _made.sizes != sizes:
        other = next(name for name in _SIZES if _made.sizes[name] != sizes[name])
        raise ConfigError(
            f"engine.{other}={sizes[other]}, but an engine of this process divides the ranks with "
            f"{_made.sizes[other]}; Megatron's groups are one for each process: give both the same sizes, or "
            "processes of their own"
        )
    if _made is None:
        _initialize(config)
        _made = _Made(sizes, world)
    return _current()


def _initialize(config: MegatronConfig) -> None:
    virtual = config.virtual_pipeline_parallel_size
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel_size,
        pipeline_model_parallel_size=config.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_parallel_size,
        expert_tensor_parallel_size=config.expert_tensor_ranks,
        distributed_timeout_minutes=_timeout_minutes(),
        create_gloo_process_groups=False,
    )


def _timeout_minutes() -> int:
    """Return how long the world's ranks wait for each other, in Megatron's unit, which has no fractions."""
    world: Any = dist.group.WORLD
    backend = world._get_backend(world._device_types[0])  # noqa: SLF001 - torch has no public way to ask
    seconds: float = backend.options._timeout.total_seconds()  # noqa: SLF001 - the same
    return max(1, math.ceil(seconds / 60))


def _current() -> Parallel:
    return Parallel(
        tensor=_group(mpu.get_tensor_model_parallel_group()),
        pipeline=_group(mpu.get_pipeline_model_parallel_group()),
        context=_group(mpu.get_context_parallel_group()),
        expert=_group(mpu.get_expert_model_parallel_group()),
        expert_tensor=_group(mpu.get_expert_tensor_parallel_group()),
        data=DataParallel(
            mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), mpu.get_data_parallel_group()
        ),
    )


def _group(group: dist.ProcessGroup) -> Group:
    return Group(dist.get_rank(group), dist.get_world_size(group), group)
