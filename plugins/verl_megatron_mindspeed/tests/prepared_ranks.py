"""Processes that are prepared for the backend megatron, as a worker's are."""

from __future__ import annotations

from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.rank_pool import RankPool


def prepare() -> None:
    """Let the backend prepare the process; imports no torch before that."""
    host = BackendHost.load("megatron")
    section = {"backend": "megatron", "device": "cpu", "learning_rate": 1e-3}
    host.prepare_process(validate(host.spec.config_class, section, at="engine"))


def new_ranks(world_size: int = 2) -> RankPool:
    """Start some; Megatron is imported in them only when something asks for it."""
    return RankPool(world_size, prepare=prepare, must_precede=("megatron",))
