"""The hooks that a backend need not write: each calls the method of the Engine that it is about."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from verl_engine.contract.markers import hookimpl
from verl_engine.contract.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from verl_engine.engine.base import Engine
    from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot


@hookimpl
def engine_gradient_sync(engine: Engine, is_last_micro_batch: bool) -> AbstractContextManager[None]:
    """Ask the engine."""
    return engine.gradient_sync(is_last_micro_batch)


@hookimpl
def engine_optimizer_step(engine: Engine, learning_rate: float | None) -> OptimizerStep:
    """Let the engine step."""
    return engine.optimizer_step(learning_rate)


@hookimpl
def engine_copy_weights_to_cpu(engine: Engine, snapshot: WeightSnapshot) -> WeightSnapshot:
    """Store the engine's own weights."""
    return snapshot.store(engine.local_weights())


@hookimpl
def engine_restore_weights_from_cpu(engine: Engine, snapshot: WeightSnapshot) -> bool:
    """Copy them back."""
    snapshot.copy_into(engine.local_weights())
    return True


_ALL: Final[tuple[Callable[..., Any], ...]] = (
    engine_gradient_sync, engine_optimizer_step, engine_copy_weights_to_cpu, engine_restore_weights_from_cpu,
)  # fmt: skip
DEFAULT_HOOKS: Final = {hook.__name__: hook for hook in _ALL}
"""By name."""
