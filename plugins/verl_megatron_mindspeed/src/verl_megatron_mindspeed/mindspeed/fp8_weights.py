"""MindSpeed's cache of weights in FP8, which it forgets at each optimizer step: here it is told of other changes."""

from __future__ import annotations

import importlib
import sys
from typing import Final

from verl_engine.contract.errors import ConfigError

_CACHE: Final = "mindspeed.te.pytorch.fp8.reuse"


def use_weight_cache() -> None:
    """Make the cache safe to use: MindSpeed must not give the memory of the weights themselves away meanwhile.

    It may do that between a weight's first use and the optimizer step, which fills the weight in again. But snapshots,
    exports and offloads read weights at other times, and an engine that is forward-only makes no step at all.

    Raises:
        ConfigError: this MindSpeed has no such cache.
    """
    try:
        cache = importlib.import_module(_CACHE)
    except ModuleNotFoundError as cause:
        raise ConfigError(
            "engine.mindspeed.fp8_reuse_quantized_weight=true, but what is installed has no module "
            f"{_CACHE}; leave it out, or install a MindSpeed that has it"
        ) from cause
    release = getattr(cache, "set_weight_release_enabled", None)
    if release is not None:  # else it gives nothing away
        release(False)


def reset_weight_caches() -> None:
    """Forget weights in FP8, because those that they were made of changed or moved; does nothing where there are none.

    MindSpeed knows a weight by its place in memory, and forgets it at each optimizer step only. So this belongs
    wherever weights are restored, loaded or moved.
    """
    cache = sys.modules.get(_CACHE)
    if cache is not None:
        cache.clear_weight_quantization_reuse_cache()
