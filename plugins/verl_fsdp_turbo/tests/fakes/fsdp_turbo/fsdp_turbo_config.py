"""The config: dataclasses that fill in what is left out, at times wrongly."""

from __future__ import annotations

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from fsdp_turbo.release import HAS

logger = logging.getLogger(__name__)


@dataclass
class FSDPPlanConfig:
    """What is sharded."""

    ignored_modules: list[str] = field(default_factory=list)
    apply_modules: dict[str, Any] | None = None
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    cpu_offload: bool = False
    pin_memory: bool = True
    num_to_forward_prefetch: int = 0
    num_to_backward_prefetch: int = 0
    hook_modules: list[str] | None = None
    fsdp_implementation: str = "native"
    gradient_divide_factor: float | None = None


@dataclass
class TPPlanConfig:
    """Tensor parallelism."""

    colwise_parallel: list[str] | None = None
    rowwise_parallel: list[str] | None = None
    sequence_parallel: list[str] | None = None


@dataclass
class _OlderCPPlanConfig:
    """Context parallelism."""

    ulysses_core_attention_function: str | list[str] | None = None
    ulysses_attention_type: Any = "default"
    ulysses_attn_output_transposed: bool = False
    kv_allgather_core_attention_function: str | list[str] | None = None
    kv_allgather_attention_type: Any = "default"


@dataclass
class _NewerCPPlanConfig(_OlderCPPlanConfig):
    """Context parallelism, function by function."""

    ulysses_function_patches: list[dict[str, Any]] = field(default_factory=list)
    loss_function_patches: list[dict[str, Any]] = field(default_factory=list)


CPPlanConfig: type[_OlderCPPlanConfig] = _NewerCPPlanConfig if "function_patches" in HAS else _OlderCPPlanConfig


@dataclass
class EPPlanConfig:
    """Expert parallelism."""

    apply_modules: list[str] | None = None
    dispatcher: Any = None
    fixed_router: bool = False
    apply_efsdp_modules: list[str] | None = None
    moonep_config: Any = None
    gradient_divide_factor: float | None = None


@dataclass
class DistributedConfig:
    """Sizes and plans."""

    data_parallel_size: int = 1
    fully_shard_parallel_size: int = 1
    fsdp_plan: FSDPPlanConfig | None = None
    tensor_parallel_size: int = 1
    tp_plan: TPPlanConfig | None = None
    kv_allgather_parallel_size: int = 1
    ulysses_parallel_size: int = 1
    cp_plan: Any = None
    expert_parallel_size: int = 1
    expert_fully_shard_parallel_size: int = 1
    expert_data_parallel_size: int = 1
    ep_plan: EPPlanConfig | None = None


@dataclass
class ChunkBatchPlanConfig:
    """Modules that run a batch in parts."""

    chunk_mbs: int = 1
    apply_modules: list[str] | None = None
    batch_dim: int = 0
    chunk_arg_indexs: list[int] | None = None
    chunk_kwarg_names: list[str] | None = None


@dataclass
class MemoryConfig:
    """Less memory for more time."""

    recompute: bool = False
    recompute_plan: list[str] | None = None
    chunk_batch: bool = False
    chunk_batch_plan: ChunkBatchPlanConfig | None = None


@dataclass
class FSDPTurboConfig:
    """Everything."""

    model: Any = None
    optimizer: Any = None
    data: Any = None
    run: Any = None
    checkpoint: Any = None
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    module_patches: list[dict[str, Any]] = field(default_factory=list)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    quantization: Any = None

    def __post_init__(self) -> None:
        """Fill in what is left out."""
        sizes = self.distributed
        sizes.cp_plan = sizes.cp_plan or CPPlanConfig()
        plan = sizes.ep_plan = sizes.ep_plan or EPPlanConfig(apply_modules=[], dispatcher="eager")
        plan.apply_modules = plan.apply_modules or []
        num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
        if plan.gradient_divide_factor is None:  # too small by the ranks that divide experts
            expert_ranks = sizes.expert_fully_shard_parallel_size * sizes.expert_parallel_size
            copies = num_ranks // expert_ranks
            plan.gradient_divide_factor = sizes.expert_fully_shard_parallel_size * copies
        if plan.apply_efsdp_modules is None:  # the block around the experts, router and all
            ending = ".experts"
            plan.apply_efsdp_modules = [
                name.removesuffix(ending) for name in plan.apply_modules if name.endswith(ending)
            ]
        self.memory.recompute_plan = self.memory.recompute_plan or []
        fsdp = sizes.fsdp_plan = sizes.fsdp_plan or FSDPPlanConfig()
        if fsdp.gradient_divide_factor is None:  # 0 where WORLD_SIZE is not set
            copies = num_ranks // (sizes.fully_shard_parallel_size * sizes.tensor_parallel_size)
            fsdp.gradient_divide_factor = sizes.fully_shard_parallel_size * copies
        if sizes.fully_shard_parallel_size > 1 and sizes.expert_parallel_size > 1:
            fsdp.ignored_modules.extend(plan.apply_modules)


def _dict_to_dataclass(kind: type[Any], data: Any) -> Any:
    """Read a mapping: what is not known is dropped with a warning, a mapping of another kind comes back as it is."""
    if not isinstance(data, dict):
        return data
    known = {entry.name for entry in dataclasses.fields(kind)}
    for key in data.keys() - known:
        logger.warning("Ignoring unknown config key '%s' for %s", key, kind.__name__)
    return kind(**{key: value for key, value in data.items() if key in known})
