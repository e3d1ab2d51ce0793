"""FullyShardedDataParallel on a model, top to bottom."""

import warnings
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from transformers import PreTrainedModel

from verl_fsdp.config import FsdpConfig
from verl_fsdp.fsdp1.passes import initialize
from verl_fsdp.fsdp1.weights import WeightTable
from verl_fsdp.model.block_settings import compile_block, enable_recompute
from verl_fsdp.model.blocks import blocks, in_sharding_order
from verl_fsdp.model.float32_parts import float32_modules
from verl_fsdp.model.materialize import Materializer

_PREFETCH = {"before": BackwardPrefetch.BACKWARD_PRE, "after": BackwardPrefetch.BACKWARD_POST, "off": None}


def shard(
    model: PreTrainedModel, config: FsdpConfig, mesh: DeviceMesh, device: torch.device
) -> tuple[FullyShardedDataParallel, WeightTable]:
    """Fill and wrap each block, then what is left. Collectives: those of `Materializer`.

    Parameters are gathered in ``param_dtype``, or in float32 where transformers keeps that, and reduced in float32;
    what each rank keeps of them is float32.

    Returns:
        The wrapped model, and what its weights were before: wrapping changes their names and shapes.
    """
    enable_recompute(model, config)
    materialize = Materializer(model, device)
    table = WeightTable.of(model)
    settings = _settings(config, mesh, device)
    parents = _parents(model)
    precise, found = float32_modules(model, config), blocks(model, config)
    for module in in_sharding_order(model, found, precise):
        materialize(module)
        if module in found:
            compile_block(module, config)
        wrapped = _wrap(
            module, settings | {"mixed_precision": _precision(torch.float32)} if module in precise else settings
        )
        for parent, name in parents[id(module)]:
            setattr(parent, name, wrapped)
    materialize(model)
    root = _wrap(model, settings)
    initialize(root)
    return root, table


def _settings(config: FsdpConfig, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    strategy, groups = _strategy(config, mesh)
    return {
        "process_group": groups,
        "sharding_strategy": strategy,
        "mixed_precision": _precision(getattr(torch, config.param_dtype)),
        "device_id": device,
        "backward_prefetch": _PREFETCH[config.backward_prefetch],
        "forward_prefetch": config.forward_prefetch,
        "use_orig_params": True,  # the optimizer sees the model's own parameters, trained and frozen ones in one block
    }


def _precision(dtype: torch.dtype) -> MixedPrecision:
    """Gather parameters in a dtype, and reduce gradients in float32."""
    return MixedPrecision(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        # What goes in are ids, and what the model hands on it computed itself, in the right dtype. A cast would
        # rebuild every argument, dataclasses among them.
        cast_forward_inputs=False,
        cast_root_forward_inputs=False,
    )


def _strategy(config: FsdpConfig, mesh: DeviceMesh) -> tuple[ShardingStrategy, Any]:
    """Choose FSDP1's name for what is configured, and the groups of ranks that it wants with it."""
    if mesh.ndim == 1:
        strategy = ShardingStrategy.FULL_SHARD if config.reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP
        return strategy, mesh.get_group("shard")
    if mesh.size(1) == 1:
        # FSDP1 would make NO_SHARD of any other strategy here, and forget to reduce over the copies.
        return ShardingStrategy.NO_SHARD, mesh.get_group("replicate")
    # torch's documentation uses this name, with its underscore.
    kept = ShardingStrategy._HYBRID_SHARD_ZERO2  # noqa: SLF001
    strategy = ShardingStrategy.HYBRID_SHARD if config.reshard_after_forward else kept
    return strategy, (mesh.get_group("shard"), mesh.get_group("replicate"))


def _wrap(module: torch.nn.Module, settings: dict[str, Any]) -> FullyShardedDataParallel:
    _unify_dtypes(module)
    with warnings.catch_warnings():
        # Said on a single rank, and of a copy on each rank: what is configured.
        warnings.filterwarnings("ignore", message=".*NO_SHARD")
        return FullyShardedDataParallel(module, **settings)


def _unify_dtypes(module: torch.nn.Module) -> None:
    """Keep what is wrapped together in float32 where its dtypes differ: FSDP1 lays it into one tensor."""
    wrapped = {
        id(parameter) for inner in FullyShardedDataParallel.fsdp_modules(module) for parameter in inner.parameters()
    }
    own = [parameter for parameter in module.parameters() if id(parameter) not in wrapped]
    if len({parameter.dtype for parameter in own}) > 1:
        for parameter in own:
            parameter.data = parameter.data.float()


def _parents(model: torch.nn.Module) -> dict[int, list[tuple[torch.nn.Module, str]]]:
    """Map each module's id to the modules that hold it, and under what name."""
    parents: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():  # noqa: SLF001 - named_children() gives each once
            parents.setdefault(id(child), []).append((parent, name))
    return parents
