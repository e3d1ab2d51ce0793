"""Processes that are prepared for the backend megatron, as a worker's are."""

from __future__ import annotations

import sys

from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.preparation.patch_promises import PatchPromises
from verl_engine.testing.rank_pool import RankPool


def prepare() -> None:
    """Let the backend prepare the process; imports no torch before that."""
    host = BackendHost.load("megatron")
    section = {"backend": "megatron", "device": "cpu", "learning_rate": 1e-3}
    host.prepare_process(validate(host.spec.config_class, section, at="engine"))


def prepare_rank() -> None:
    """Do so, and let the host search modules for stale aliases when there are new ones, not after each engine.

    The search takes ten times as long as building one of the tests' engines.
    """
    prepare()
    check = PatchPromises.check
    searched: set[str] = set()

    def check_when_modules_came_in(promises: PatchPromises) -> None:
        if searched.issuperset(sys.modules):
            promises.check_names()
            return
        check(promises)
        searched.update(sys.modules)

    PatchPromises.check = check_when_modules_came_in  # type: ignore[method-assign]


def new_ranks(world_size: int = 2) -> RankPool:
    """Start some; Megatron is imported in them only when something asks for it."""
    return RankPool(world_size, prepare=prepare_rank, must_precede=("megatron",))
