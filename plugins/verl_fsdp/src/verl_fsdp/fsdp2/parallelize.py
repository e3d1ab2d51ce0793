"""fully_shard on a model, top to bottom."""

from typing import Any, Final, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from verl_fsdp.config import Fsdp2Config
from verl_fsdp.model.block_settings import compile_block, enable_recompute
from verl_fsdp.model.blocks import blocks, in_sharding_order, outermost
from verl_fsdp.model.float32_parts import float32_modules
from verl_fsdp.model.materialize import Materializer

_FLOAT32: Final = MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=False)


def shard(model: PreTrainedModel, config: Fsdp2Config, mesh: DeviceMesh, device: torch.device) -> FSDPModule:
    """Fill and shard each block, then what is left. Collectives: those of `Materializer`.

    Parameters are gathered in ``param_dtype``, or in float32 where transformers keeps that, and reduced in float32;
    what each rank keeps of them is float32.
    """
    settings = _settings(config, mesh, device)
    enable_recompute(model, config)
    precise = float32_modules(model, config)
    materialize = Materializer(model, device)
    found = blocks(model, config)
    for module in in_sharding_order(model, found, precise):
        materialize(module)
        if module in found:
            compile_block(module, config)
        fully_shard(module, **(settings | {"mp_policy": _FLOAT32} if module in precise else settings))
    materialize(model)
    root = fully_shard(model, **settings)
    _set_prefetch(root, cast("list[FSDPModule]", outermost(found)), config)
    return root


def _settings(config: Fsdp2Config, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    # No output_dtype: what a block hands on would no longer fit the next one's weights.
    settings: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": config.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32),
    }
    if config.cpu_offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")  # pinning needs an accelerator
    return settings


def _set_prefetch(root: FSDPModule, found: list[FSDPModule], config: Fsdp2Config) -> None:
    """Let each block's forward, or backward, begin to gather so many of those that come next."""
    if config.forward_prefetch:
        root.set_modules_to_forward_prefetch(found[: config.forward_prefetch])
    for index, block in enumerate(found):
        if config.forward_prefetch:
            block.set_modules_to_forward_prefetch(found[index + 1 : index + 1 + config.forward_prefetch])
        if config.backward_prefetch:
            first = max(0, index - config.backward_prefetch)
            block.set_modules_to_backward_prefetch(found[first:index][::-1])
