"""Which weights transformers keeps in float32 in a model of a narrow dtype, such as a router's bias."""

import copy
import re
from collections.abc import Mapping
from typing import Any

import torch

_NARROW = (torch.bfloat16, torch.float16)


def held_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Name the weights that transformers holds in another dtype than the one a model is loaded in.

    By the names of the plain model's state dict, of a model that may be sharded or adapted; of any module that is not
    one of transformers nothing is known.
    """
    plain = plain_class(model)
    if plain is None or dtype not in _NARROW:
        return {}
    config = copy.deepcopy(model.config)  # making a model writes into its config
    with torch.device("meta"):
        skeleton: Any = plain._from_config(config, dtype=dtype, attn_implementation="eager")  # noqa: SLF001 - what from_config calls
    kept = _kept(skeleton, dtype)
    held = {
        name: torch.float32 if kept.search(name) else tensor.dtype
        for name, tensor in skeleton.state_dict().items()
        if tensor.is_floating_point()
    }
    return {name: other for name, other in held.items() if other != dtype}


def plain_class(model: Any) -> Any:
    """Return the class of a model of transformers, also where fully_shard made another of it; None for any other."""
    kinds = (kind for kind in type(model).__mro__ if all(base.__name__ != "FSDPModule" for base in kind.__mro__))
    return next((kind for kind in kinds if hasattr(kind, "_from_config")), None)


def _kept(model: Any, dtype: torch.dtype) -> re.Pattern[str]:
    """Return what the names of weights that stay float32 match, as ``from_pretrained`` has it."""
    patterns = list(model._keep_in_fp32_modules_strict or ())  # noqa: SLF001 - transformers' own convention
    if dtype is torch.float16:
        patterns += model._keep_in_fp32_modules or ()  # noqa: SLF001
    if not hasattr(model, "_get_dtype_plan"):  # transformers 4: whole parts of names
        patterns = [rf"(?:^|\.){pattern}(?:$|\.)" for pattern in patterns]
    return re.compile("|".join(pattern.replace("*", ".*") for pattern in patterns) or r"(?!)")


def cast_dtype(name: str, own: torch.dtype, dtype: torch.dtype | None, held: Mapping[str, torch.dtype]) -> torch.dtype:
    """Return in which dtype a weight of one's own dtype leaves, where floating-point ones are to be cast."""
    return own if dtype is None or not own.is_floating_point else held.get(name, dtype)
