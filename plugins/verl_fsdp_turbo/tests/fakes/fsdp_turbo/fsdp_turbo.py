"""The wrapper: everything is applied when it is made."""

from __future__ import annotations

import importlib
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
            _patch(patch)
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


def _patch(patch: dict[str, Any]) -> None:
    """Put one function in place of another, of a module or of a class in one."""
    *path, name = patch["target"].split(".")
    for split in range(len(path), 0, -1):
        try:
            holder: Any = importlib.import_module(".".join(path[:split]))
        except ModuleNotFoundError:
            continue
        for part in path[split:]:
            holder = getattr(holder, part, None)
        if holder is None or not hasattr(holder, name):
            break
        module_name, _, function = patch["replacement"].rpartition(".")
        setattr(holder, name, getattr(importlib.import_module(module_name), function))
        return
    raise RuntimeError(f"Configured module patch did not match the model: target={patch['target']!r}.")


def _recompute(module: Any) -> None:
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if "past_key_values" in kwargs:
            kwargs["past_key_values"] = None
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)

    module.forward = forward


def _chunk(module: Any, plan: Any) -> None:
    plain, dim, size = module.forward, plan.batch_dim, plan.chunk_mbs

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        cut_args = {index: args[index].split(size, dim) for index in plan.chunk_arg_indexs or ()}
        cut_kwargs = {
            name: kwargs[name].split(size, dim)
            for name in plan.chunk_kwarg_names or ()
            if isinstance(kwargs.get(name), torch.Tensor)
        }
        count = len(next(iter((*cut_args.values(), *cut_kwargs.values()))))
        outputs = [
            plain(
                *(cut_args[index][part] if index in cut_args else value for index, value in enumerate(args)),
                **(kwargs | {name: pieces[part] for name, pieces in cut_kwargs.items()}),
            )
            for part in range(count)
        ]
        return torch.cat(outputs, dim=dim)

    module.forward = forward
