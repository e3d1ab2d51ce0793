"""All checks of the kit, in the order in which they run: what others build on comes first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.testing.conformance import (
    accumulation,
    checkpoints,
    config,
    deadlock,
    determinism,
    forward_only,
    gradient_sync,
    loading,
    log_probs,
    lora,
    modes,
    offload,
    optimizer,
    recovery,
    router_replay,
    several_engines,
    snapshots,
    top_k,
    values,
    weights,
)

if TYPE_CHECKING:
    from verl_engine.testing.conformance.check import Check

_TOPICS = (
    loading,
    config,
    weights,
    log_probs,
    top_k,
    values,
    accumulation,
    gradient_sync,
    optimizer,
    recovery,
    modes,
    determinism,
    snapshots,
    offload,
    forward_only,
    router_replay,
    several_engines,
    lora,
    checkpoints,
    deadlock,
)


def all_checks() -> tuple[Check, ...]:
    """Return every check."""
    checks: tuple[Check, ...] = ()
    for topic in _TOPICS:
        checks += topic.CHECKS
    return checks
