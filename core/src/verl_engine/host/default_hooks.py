"""The hooks that a backend need not write: each calls the method of the Engine that it is about.

`verl_engine.host.registration` registers one only where the backend does not implement the hook: each hook has exactly
one implementation. A second one would be called where the first returns None, and an optimizer would step twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from verl_engine.contract.markers import hookimpl
from verl_engine.contract.optimizer_step import OptimizerStep

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

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


DEFAULT_HOOKS: Final[dict[str, Callable[..., Any]]] = {
    hook.__name__: hook
    for hook in (
        engine_gradient_sync,
        engine_optimizer_step,
        engine_copy_weights_to_cpu,
        engine_restore_weights_from_cpu,
    )
}
"""By name."""
