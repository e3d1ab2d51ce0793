"""What one optimizer step did."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Result of ``engine_optimizer_step``; equal on every rank."""

    grad_norm: float
    """L2 norm over all parameters and ranks before clipping; ``inf`` or ``nan`` if not finite."""
    applied: bool
    """False when the gradient was not finite: weights, optimizer and schedule stayed as they were."""
    learning_rate: float
    """The rate this step used, or would have used."""
    overflow: bool = False
    """True for a step that was not applied where the engine lowered its loss scale (float16), which may fix it: such a
    step does not count for ``max_skipped_steps``."""
    num_zeros: int | None = None
    """Entries of the gradient that are exactly 0, over all parameters; None where the engine does not count them."""
