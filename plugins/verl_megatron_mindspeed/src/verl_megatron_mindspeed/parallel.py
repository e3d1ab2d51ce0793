"""Which ranks split the model, and how: Megatron's process groups.

Megatron's functions look them up in a module, which has one set of them. Each engine puts its own there while it runs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from verl_engine.engine.base import DataParallel
from verl_engine.engine.process_group import is_alive
from verl_megatron_mindspeed.config import MegatronConfig

_LISTS: Final = ("_global_process_group_list",)
"""The names of Megatron's state that are not in capitals."""


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
    state: dict[str, Any] = field(repr=False)
    """What Megatron's functions look the groups up in, by the names of its module."""

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let Megatron use these groups inside; what it had before, another engine's or nothing, comes back."""
        if mpu._TENSOR_MODEL_PARALLEL_GROUP is self.tensor.group:  # noqa: SLF001 - it asserts where there is none
            yield
            return
        before = _exchange(self.state)
        try:
            yield
        finally:
            self.state.update(_exchange(before))


_layouts: list[tuple[dict[str, int | None], Parallel]] = []
"""What engines of this process have made, by their sizes."""


def build_groups(config: MegatronConfig) -> Parallel:
    """Make Megatron's groups, or take those of an engine that divides the ranks alike.

    Collectives: those of new groups.
    """
    sizes = config.parallel_sizes
    _layouts[:] = [entry for entry in _layouts if is_alive(entry[1].tensor.group)]
    for made, parallel in _layouts:
        if made == sizes:
            return parallel
    before = _exchange({name: {} if isinstance(value, dict) else None for name, value in _state().items()})
    try:
        mpu.initialize_model_parallel(
            **sizes, distributed_timeout_minutes=_timeout_minutes(), create_gloo_process_groups=False
        )
        parallel = Parallel(
            tensor=_group(mpu.get_tensor_model_parallel_group()),
            pipeline=_group(mpu.get_pipeline_model_parallel_group()),
            context=_group(mpu.get_context_parallel_group()),
            expert=_group(mpu.get_expert_model_parallel_group()),
            expert_tensor=_group(mpu.get_expert_tensor_parallel_group()),
            data=DataParallel(
                mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size(), mpu.get_data_parallel_group()
            ),
            state=_state(),
        )
    finally:
        _exchange(before)
    _layouts.append((sizes, parallel))
    return parallel


def _state() -> dict[str, Any]:
    """Return what Megatron keeps of the division of the ranks, by the names of its module."""
    return {name: value for name, value in vars(mpu).items() if name in _LISTS or (name[0] == "_" and name.isupper())}


def _exchange(state: dict[str, Any]) -> dict[str, Any]:
    """Put a state into Megatron's module; return what was there."""
    before = {name: vars(mpu)[name] for name in state}
    vars(mpu).update(state)
    return before


def _timeout_minutes() -> int:
    """Return how long the world's ranks wait for each other, in Megatron's unit, which has no fractions."""
    world: Any = dist.group.WORLD
    backend = world._get_backend(world._device_types[0])  # noqa: SLF001 - torch has no public way to ask
    seconds: float = backend.options._timeout.total_seconds()  # noqa: SLF001 - the same
    return max(1, math.ceil(seconds / 60))


def _group(group: dist.ProcessGroup) -> Group:
    return Group(dist.get_rank(group), dist.get_world_size(group), group)
