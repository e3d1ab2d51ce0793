"""Modules that compute in float32 in a model of a narrow dtype, as transformers has it: each is sharded by itself.

A sharded module is gathered in one dtype. Where it holds only weights that transformers keeps in float32, such as a
router, it computes as transformers does. Where it holds others too, it computes in float32 as a whole.
"""

from typing import Any

import torch
from transformers import PreTrainedModel

from verl_engine.engine.weights.held_dtypes import held_dtypes
from verl_fsdp.config import ShardedConfig
from verl_fsdp.model.linear_layers import weights_used


def float32_parameters(model: PreTrainedModel, config: ShardedConfig) -> set[str]:
    """Name the parameters that transformers keeps in float32 where the model is held in ``param_dtype``."""
    held = held_dtypes(model, getattr(torch, config.param_dtype))
    return {name for name, _ in model.named_parameters() if name.replace(".base_layer.", ".") in held}


def float32_modules(model: PreTrainedModel, config: ShardedConfig) -> list[torch.nn.Module]:
    """Find the modules to shard in float32, and let those with other weights too cast what goes in and comes out.

    They come in no order, and all of them are called; the model itself is never among them.
    """
    kept = float32_parameters(model, config)
    found: dict[str, torch.nn.Module] = {}
    for name in sorted(kept):
        path = _called(model, name)
        if path:
            found[path] = model.get_submodule(path)
    outermost = {
        path: module for path, module in found.items() if not any(path.startswith(f"{other}.") for other in found)
    }
    dtype = getattr(torch, config.param_dtype)
    for path, module in outermost.items():
        if any(f"{path}.{name}" not in kept for name, _ in module.named_parameters()):
            module.register_forward_pre_hook(
                lambda _, args, kwargs: (_cast(args, torch.float32), _cast(kwargs, torch.float32)), with_kwargs=True
            )
            module.register_forward_hook(lambda _module, _args, output: _cast(output, dtype))
    return list(outermost.values())


def _called(model: torch.nn.Module, name: str) -> str:
    """Return the path of the innermost module around a parameter that is called, so that it is gathered in time."""
    path, _, _ = name.rpartition(".")
    while path:
        parent_path, _, own = path.rpartition(".")
        module, parent = model.get_submodule(path), model.get_submodule(parent_path)
        has_forward = type(module).forward is not torch.nn.Module.forward
        if has_forward and own not in weights_used(parent):
            return path
        path = parent_path
    return path


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
