"""``fully_shard`` by plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from fsdp_turbo.utils.str_match import matching

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64, None: None}


def shard_model(model: torch.nn.Module, mesh: DeviceMesh, plan: Any) -> torch.nn.Module:
    """Shard the modules of the plan, then what is left."""
    patterns = plan.apply_modules.items()
    ignored: set[torch.nn.Parameter] = set()
    ignored_names = set()
    if plan.ignored_modules:
        for name, module in matching(model, plan.ignored_modules, "FSDP2"):
            ignored_names.add(name)
            ignored.update(module.parameters())
    if plan.hook_modules:
        list(matching(model, plan.hook_modules, "FSDP2"))
    settings: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": ignored,
        "offload_policy": offload_policy(plan),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=_DTYPES[plan.param_dtype],
            reduce_dtype=_DTYPES[plan.reduce_dtype],
            output_dtype=_DTYPES[plan.output_dtype],
            cast_forward_inputs=plan.cast_forward_inputs,
        ),
    }
    sharded: list[Any] = []
    for name, module in matching(model, [pattern for pattern, _ in patterns], "FSDP2"):
        if name in ignored_names:
            continue
        own: dict[str, Any] = {}
        for pattern, arguments in patterns:
            if any(found is module for _, found in matching(model, [pattern], "FSDP2")):
                own |= arguments
        fully_shard(module, **(settings | own))
        sharded.append(module)
    root: Any = fully_shard(model, **settings)
    for module in (*sharded, root):
        module.set_gradient_divide_factor(plan.gradient_divide_factor)
    _prefetch(sharded, plan)
    return model


def offload_policy(plan: Any) -> OffloadPolicy:
    """Say where shards lie."""
    return CPUOffloadPolicy(pin_memory=plan.pin_memory) if plan.cpu_offload else OffloadPolicy()


def _prefetch(sharded: list[Any], plan: Any) -> None:
    for index, module in enumerate(sharded):
        ahead = sharded[index + 1 : index + 1 + plan.num_to_forward_prefetch]
        if ahead:
            module.set_modules_to_forward_prefetch(ahead)
        behind = sharded[max(0, index - plan.num_to_backward_prefetch) : index][::-1]
        if behind:
            module.set_modules_to_backward_prefetch(behind)
