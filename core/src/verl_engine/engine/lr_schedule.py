"""The learning-rate schedule, once for all backends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from verl_engine.contract.engine_config import EngineConfig


def lr_multiplier(config: EngineConfig, step: int) -> float:
    """Return the share of the peak learning rate that an optimizer step uses.

    Rises linearly over ``warmup_steps`` (the first step already uses 1 / warmup_steps), then stays, or falls to
    ``min_lr_ratio`` at ``total_steps`` and stays there.

    Args:
        config: the ``engine`` section.
        step: optimizer steps applied before this one.
    Raises:
        ConfigError: a falling schedule without ``total_steps``.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    if config.total_steps is None:
        raise ConfigError(f"engine.lr_schedule={config.lr_schedule} needs engine.total_steps to know where to end")
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    fall = progress if config.lr_schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1 - fall * (1 - config.min_lr_ratio)
