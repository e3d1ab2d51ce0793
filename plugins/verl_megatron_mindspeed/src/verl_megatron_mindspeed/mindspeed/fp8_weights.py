"""MindSpeed's FP8: what it needs, and its cache of weights, which is told here of changes besides optimizer steps."""

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Final

from verl_engine.contract.errors import ConfigError
from verl_megatron_mindspeed.mindspeed.packages import MEGATRON_ADAPTOR, AdaptorPackage, version_of

_CACHE: Final = "mindspeed.te.pytorch.fp8.reuse"


def check_fp8(package: AdaptorPackage, fp8: object) -> None:
    """Check, before anything is patched or imported, that ``engine.transformer_options.fp8`` can be computed.

    ConfigError where MindSpeed's own FP8 layers need a part of Megatron that is not in its wheels.
    """
    if not fp8 or package is MEGATRON_ADAPTOR or importlib.util.find_spec(MEGATRON_ADAPTOR.name) is not None:
        return
    spec = importlib.util.find_spec("megatron")
    places = (spec and spec.submodule_search_locations) or ()
    if not any((Path(place) / "training").is_dir() for place in places):
        version = version_of("megatron-core") or "0.16.1"
        raise ConfigError(
            f"engine.transformer_options.fp8={fp8}: MindSpeed's FP8 layers import megatron.training, which the wheel "
            f"of megatron-core {version} lacks; leave fp8 out, or install Megatron from its source: git clone -b "
            f"core_v{version} https://github.com/NVIDIA/Megatron-LM && export PYTHONPATH=$PWD/Megatron-LM:$PYTHONPATH"
        )


def use_weight_cache() -> None:
    """Make the cache safe to use: MindSpeed must not give the memory of the weights themselves away meanwhile.

    It may do that between a weight's first use and the optimizer step, which fills the weight in again. But snapshots,
    exports and offloads read weights at other times, and an engine that is forward-only makes no step at all.
    ConfigError where this MindSpeed has no such cache.
    """
    try:
        cache = importlib.import_module(_CACHE)
    except ModuleNotFoundError as cause:
        raise ConfigError(
            "engine.mindspeed.fp8_reuse_quantized_weight=true, but what is installed has no module "
            f"{_CACHE}; leave it out, or install a MindSpeed that has it"
        ) from cause
    release = getattr(cache, "set_weight_release_enabled", None)
    if release is not None:  # else it never releases weights
        release(False)


def reset_weight_caches() -> None:
    """Forget weights in FP8, because those that they were made of changed or moved; does nothing where there are none.

    MindSpeed knows a weight by its place in memory, and forgets it at each optimizer step only. So this belongs
    wherever weights are restored, loaded or moved.
    """
    cache = sys.modules.get(_CACHE)
    if cache is not None:
        cache.clear_weight_quantization_reuse_cache()
