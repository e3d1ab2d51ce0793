"""From our config to the library's, as plain values. Imports no torch, so that a laptop can print it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from pydantic import BaseModel

if TYPE_CHECKING:
    from verl_fsdp_turbo.config import FsdpTurboConfig

EACH_LAYER: Final = "<each decoder layer of the model>"
"""Stands for patterns that only the model can tell."""
_DTYPES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def library_config(config: FsdpTurboConfig, num_ranks: int, device_kind: str) -> dict[str, Any]:
    """Say all that the library is told, by its own keys; it decides nothing, for some of its defaults are wrong.

    Where the config leaves patterns to the model, `EACH_LAYER` stands for them. Memory is pinned for accelerators only.
    """
    distributed: dict[str, Any] = {
        "fully_shard_parallel_size": config.fully_shard_parallel_size or num_ranks,
        "tensor_parallel_size": 1,
        "kv_allgather_parallel_size": 1,
        "ulysses_parallel_size": config.ulysses_parallel_size,
        "expert_parallel_size": config.expert_parallel_size,
        "expert_fully_shard_parallel_size": config.expert_fully_shard_parallel_size,
        "fsdp_plan": _fsdp_plan(config, num_ranks, device_kind),
    }
    if config.expert_parallel_size > 1:
        distributed["ep_plan"] = {
            "apply_modules": list(config.ep_plan.apply_modules),
            # The library's own choice wraps the block around the experts: then nobody averages the router's gradient.
            "apply_efsdp_modules": list(config.ep_plan.apply_modules),
            "dispatcher": config.ep_plan.dispatcher,
            "fixed_router": False,
            # An expert has seen the tokens of all ranks, and every token counts once.
            "gradient_divide_factor": float(num_ranks),
        }
    if config.ulysses_parallel_size > 1:
        distributed["cp_plan"] = {
            "ulysses_function_patches": _plain(config.cp_plan.ulysses_function_patches),
            "loss_function_patches": _plain(config.cp_plan.loss_function_patches),
        }
    return {"distributed": distributed, "module_patches": _plain(config.module_patches), "memory": _memory(config)}


def _fsdp_plan(config: FsdpTurboConfig, num_ranks: int, device_kind: str) -> dict[str, Any]:
    plan = config.fsdp_plan
    chosen: dict[str, dict[str, Any]] = {EACH_LAYER: {}}
    if plan.apply_modules is not None:
        chosen = {pattern: sharding.arguments() for pattern, sharding in plan.apply_modules.items()}
    return {
        "apply_modules": chosen,
        "ignored_modules": [],
        "param_dtype": _DTYPES[config.param_dtype],
        "reduce_dtype": "fp32",
        "output_dtype": None,
        "cast_forward_inputs": True,
        "cpu_offload": config.stays_on_cpu,
        "pin_memory": plan.pin_memory and device_kind != "cpu",  # pinning needs an accelerator
        "num_to_forward_prefetch": plan.num_to_forward_prefetch,
        "num_to_backward_prefetch": plan.num_to_backward_prefetch,
        "fsdp_implementation": plan.fsdp_implementation,
        # Said outright: the library would take it from WORLD_SIZE, and divide by 0 where that is not set.
        "gradient_divide_factor": float(num_ranks),
    }


def _memory(config: FsdpTurboConfig) -> dict[str, Any]:
    memory = config.memory
    told: dict[str, Any] = {"recompute": memory.recompute, "chunk_batch": memory.chunk_batch is not None}
    if memory.recompute:
        told["recompute_plan"] = list(memory.recompute_plan) or [EACH_LAYER]
    if memory.chunk_batch is not None:
        told["chunk_batch_plan"] = memory.chunk_batch.model_dump(mode="json")
    return told


def _plain(sections: Iterable[BaseModel]) -> list[dict[str, Any]]:
    return [section.model_dump(mode="json") for section in sections]
