"""What tests do on a rank. Imports no torch: a rank is prepared first."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.rank_state import end_groups

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_engine.testing.conformance.driver import Driver

SECTION: dict[str, Any] = {"backend": "fsdp_turbo", "device": "cpu", "learning_rate": 1e-2}


def prepare() -> None:
    """Let the backend prepare the process, as a worker would."""
    host = BackendHost.load("fsdp_turbo")
    host.prepare_process(validate(host.spec.config_class, SECTION, at="engine"))


def build(rank: int, folder: Path, num_ranks: int = 2, **settings: Any) -> Driver:
    """Build an engine in a process that looks as if it had none before: ranks stay for many tests."""
    forget_division()
    return build_another(rank, folder, num_ranks, **settings)


def build_another(rank: int, folder: Path, num_ranks: int = 2, **settings: Any) -> Driver:
    """Build an engine beside those that the process has."""
    from verl_engine.testing.conformance.driver import Driver

    return Driver(SECTION | settings, folder, rank, num_ranks)


def forget_division() -> None:
    """Let the next engine divide the ranks anew."""
    from verl_fsdp_turbo import parallel_state

    state = importlib.import_module("fsdp_turbo.distributed.parallel_state")
    if hasattr(state, "reset_parallel_state"):  # without it, tests over the real library must have equal sizes
        state.reset_parallel_state()
        parallel_state._made.clear()


def tidy() -> None:
    """End a call's groups, and with them the division."""
    forget_division()
    end_groups()


def refusal(attempt: Callable[[], object]) -> str:
    """Return the message of what an attempt raises; an empty one where it does not."""
    from verl_engine.contract.errors import EngineError

    try:
        attempt()
    except EngineError as error:
        return f"{type(error).__name__}: {error}"
    return ""
