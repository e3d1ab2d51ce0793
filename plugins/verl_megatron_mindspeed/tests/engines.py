"""Engines of the tests: in one process they follow each other, divided among the ranks in different ways."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.conformance.driver import Driver
    from verl_megatron_mindspeed.engine import MegatronEngine

WHOLE: Final[dict[str, Any]] = {"distributed_optimizer": False}
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "dp": {},
    "dp, whole optimizer": WHOLE,
    "tp": {"tensor_parallel_size": 2},
    "tp, sequence": {"tensor_parallel_size": 2, "sequence_parallel": True, **WHOLE},
    "pp": {"pipeline_parallel_size": 2},
    "cp": {"context_parallel_size": 2},
}


def forget_groups() -> None:
    """Let ranks be divided anew, and end Megatron's groups, of which each has threads; every rank does."""
    if "megatron.core.parallel_state" not in sys.modules:
        return
    import torch.distributed as dist
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from verl_megatron_mindspeed import parallel

    groups = [group for _, made in parallel._layouts for group in made.state["_global_process_group_list"]]
    RotaryEmbedding.forward.cache_clear()  # it keeps the last modules that it was called on, with their groups
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:  # None stands for the world
            dist.destroy_process_group(group)


def new_driver(folder: Path, rank: int, **settings: Any) -> Driver:
    """Build an engine; those before it in this process are not to be used any more."""
    forget_groups()
    return another_driver(folder, rank, **settings)


def another_driver(folder: Path, rank: int, **settings: Any) -> Driver:
    """Build an engine beside those before it."""
    import torch.distributed as dist

    from verl_engine.testing.conformance.driver import Driver

    section = {"backend": "megatron", "device": "cpu", "learning_rate": 1e-2, **settings}
    return Driver(section, folder, rank, dist.get_world_size())


def engine_of(driver: Driver) -> MegatronEngine:
    """Return the engine with all its parts."""
    from verl_megatron_mindspeed.engine import MegatronEngine

    assert isinstance(driver.engine, MegatronEngine)
    return driver.engine
