"""Processes that are prepared for the backend megatron, as a worker's are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plugins.verl_megatron_mindspeed.tests.engines import forget_groups
from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost

if TYPE_CHECKING:
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools


def prepare() -> None:
    """Let the backend prepare the process; imports no torch before that."""
    host = BackendHost.load("megatron")
    section = {"backend": "megatron", "device": "cpu", "learning_rate": 1e-3}
    host.prepare_process(validate(host.spec.config_class, section, at="engine"))


def prepared(pools: RankPools, world_size: int) -> RankPool:
    """Return ranks of a session; Megatron is imported in them only when something asks for it."""
    return pools.get(world_size, prepare=prepare, must_precede=("megatron",), tidy=forget_groups)
