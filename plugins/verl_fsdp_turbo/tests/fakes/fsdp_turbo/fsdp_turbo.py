"""The wrapper: everything is applied when it is made."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fsdp_turbo.distributed.experts import divide_experts, shard_experts
from fsdp_turbo.distributed.parallel_state import init_parallel_state
from fsdp_turbo.distributed.sharding import shard_model
from fsdp_turbo.distributed.ulysses import patch_functions
from fsdp_turbo.utils.str_match import matching


class FSDPTurbo(torch.nn.Module):
    """Holds the model as ``model``; its own state dict has that as a prefix."""

    def __init__(self, config: Any, model: torch.nn.Module) -> None:
        """Patch, divide and shard."""
        super().__init__()
        self.config = config
        self.model = model
        self.parallel_state = init_parallel_state(config)
        sizes = config.distributed
        if sizes.ulysses_parallel_size > 1:
            patch_functions(sizes.cp_plan, self.parallel_state.get_group("ulysses"))
        for patch in config.module_patches:
            _patch(model, patch)
        if sizes.expert_parallel_size > 1:
            divide_experts(model, self.parallel_state.get_device_mesh("ep"), sizes.ep_plan)
            shard_experts(model, self.parallel_state.get_device_mesh("edp_efsdp"), sizes.ep_plan, sizes.fsdp_plan)
        if config.memory.recompute:
            for _, module in matching(model, config.memory.recompute_plan, "Recompute"):
                _recompute(module)
        if config.memory.chunk_batch:
            for _, module in matching(model, config.memory.chunk_batch_plan.apply_modules, "Chunk Batch"):
                _chunk(module, config.memory.chunk_batch_plan)
        self.model = shard_model(model, self.parallel_state.get_device_mesh("dp_fsdp"), sizes.fsdp_plan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        return self.model(*args, **kwargs)

    def close(self) -> None:
        """Nothing is held."""


def _patch(model: torch.nn.Module, patch: dict[str, Any]) -> None:
    """Replace a function of a module, with its other names; or a method of each module of the model's class."""
    path, _, name = patch["target"].rpartition(".")
    home, _, function = patch["replacement"].rpartition(".")
    new = getattr(importlib.import_module(home), function)
    try:
        owner = importlib.import_module(path)
    except ModuleNotFoundError:
        home, _, kind = path.rpartition(".")
        found = [each for each in model.modules() if isinstance(each, getattr(importlib.import_module(home), kind))]
        for each in found:
            setattr(each, name, types.MethodType(new, each))
        if not found:
            raise RuntimeError(
                f"Configured module patch did not match the model: target={patch['target']!r}."
            ) from None
    else:
        old = getattr(owner, name)
        for module in list(sys.modules.values()):
            for other, value in list(vars(module).items()):
                if value is old:
                    setattr(module, other, new)


def _recompute(module: Any) -> None:
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            kwargs["past_key_values"] = None
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    module.forward = forward


def _chunk(module: Any, plan: Any) -> None:
    plain, dim, size = module.forward, plan.batch_dim, plan.chunk_mbs
    indices, names = list(plan.chunk_arg_indexs or ()), list(plan.chunk_kwarg_names or ())

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_given = indices and len(args) > indices[0]
        count = (args[indices[0]] if is_given else kwargs[names[0]]).shape[dim]
        if count <= size:
            return plain(*args, **kwargs)
        outputs = []
        for start in range(0, count, size):
            length = min(size, count - start)
            own = [_cut(each, dim, start, length) if index in indices else each for index, each in enumerate(args)]
            named = {key: _cut(each, dim, start, length) if key in names else each for key, each in kwargs.items()}
            outputs.append(plain(*own, **named))
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs, dim=dim)
        return type(outputs[0])(torch.cat(parts, dim=dim) for parts in zip(*outputs, strict=True))

    module.forward = forward


def _cut(value: Any, dim: int, start: int, length: int) -> Any:
    """Cut tensors, also those in tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        return value.narrow(dim, start, length)
    if isinstance(value, Mapping):
        return {key: _cut(each, dim, start, length) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(each, dim, start, length) for each in value)
    return value
