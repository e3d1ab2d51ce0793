"""What the optimizer of either backend gets as gradient, whole: for tests only."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from verl_fsdp.fsdp1.weights import FlatWeights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor import DTensor

    from verl_fsdp.engine import ShardedEngine
    from verl_fsdp.fsdp1.flat_unit import FlatUnit


def units_of(engine: ShardedEngine) -> list[FlatUnit]:
    """Return FSDP1's flat tensors of an engine."""
    assert isinstance(engine.weights, FlatWeights)
    return engine.weights.units


def whole_gradients(engine: ShardedEngine) -> dict[str, torch.Tensor]:
    """Return the gradient of what is trained, by name. Collectives: all-gathers."""
    if not isinstance(engine.weights, FlatWeights):
        gradients = {name: parameter.grad for name, parameter in engine.parameters.items()}
        return {name: cast("DTensor", grad).full_tensor() for name, grad in gradients.items() if grad is not None}
    found: dict[str, torch.Tensor] = {}
    for unit in units_of(engine):
        local = torch.zeros_like(unit.local, dtype=torch.float32)
        trained = [member for member in unit.members if member.parameter.requires_grad]
        for member in trained:
            gradient = member.parameter.grad
            if gradient is not None:  # an empty piece has none
                unit.piece(member, local).copy_(gradient.reshape(-1))
        flat = unit.gather(local)
        found |= {member.name: unit.whole(member, flat).clone() for member in trained}
    return found


def look_instead_of_stepping(engine: ShardedEngine) -> list[dict[str, torch.Tensor]]:
    """Let the optimizer note the gradient it gets in place of stepping; return where it is noted."""
    found: list[dict[str, torch.Tensor]] = []
    step: Callable[[], None] = lambda: found.append(whole_gradients(engine))  # noqa: E731 - one line says it
    engine.optimizer.step = step  # type: ignore[method-assign, assignment]
    return found
