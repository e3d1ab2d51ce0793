"""The learning-rate schedule, once for all backends."""

import math

from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError


def lr_multiplier(config: EngineConfig, step: int) -> float:
    """Return the fraction of the peak learning rate that the optimizer step after `step` others uses.

    Rises linearly over ``warmup_steps`` (the first step already uses 1 / warmup_steps), then stays, or falls to
    ``min_lr_ratio`` at ``total_steps`` and stays there: at once, or (``wsd``) over the last ``decay_steps``. A
    ConfigError for a falling schedule without ``total_steps``.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    if config.total_steps is None:
        raise ConfigError(f"engine.lr_schedule={config.lr_schedule} needs engine.total_steps to know where to end")
    start = config.warmup_steps
    if config.lr_schedule == "wsd":
        start = max(start, config.total_steps - (config.decay_steps or max(1, config.total_steps // 10)))
    progress = min(1.0, max(0.0, (step - start) / (config.total_steps - start)))
    fall = (1 - math.cos(math.pi * progress)) / 2 if config.lr_schedule == "cosine" else progress
    return 1 - fall * (1 - config.min_lr_ratio)
