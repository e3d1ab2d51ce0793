"""The ``engine`` section of the backend fsdp_turbo. Imports no torch, and nothing of the library."""

from typing import Any, Literal, Self

from pydantic import model_validator

from verl_engine.contract.bounded import Ranks
from verl_fsdp.config import ShardedConfig, require_divisor
from verl_fsdp_turbo.library_config import library_config
from verl_fsdp_turbo.plans import ContextPlan, ExpertPlan, FsdpPlan, MemoryPlan, ModulePatch


class FsdpTurboConfig(ShardedConfig):
    """Ascend's FSDP-Turbo library: ``fully_shard`` with expert and context parallelism."""

    backend: Literal["fsdp_turbo"] = "fsdp_turbo"
    """Fixed: this section is for ``fsdp_turbo``."""
    fully_shard_parallel_size: Ranks | None = None
    """Ranks that share one copy of the weights; it divides the number of ranks, and each further such group holds a
    copy of its own (HSDP). By default all ranks share one."""
    ulysses_parallel_size: Ranks = 1
    """Ranks that split the tokens of each micro-batch by the library's means; see ``cp_plan``. Not together with
    ``sequence_parallel_size``, which does the same by the engine's own for models with plain attention."""
    expert_parallel_size: Ranks = 1
    """Ranks that divide the experts of a mixture-of-experts model; see ``ep_plan``. At least two experts per rank."""
    expert_fully_shard_parallel_size: Ranks = 1
    """Ranks that share one copy of a rank's experts."""
    tensor_parallel_size: Ranks = 1
    """Stays 1: the library does not average the gradients of parameters that it splits so."""
    kv_allgather_parallel_size: Ranks = 1
    """Stays 1: what masks the library's second way to split sequences needs is not known."""
    offload_policy: bool = False
    """Keep weights, gradients and optimizer state on the CPU, and bring each module to the device when it is used;
    slow. With ``forward_only`` it is always so: a reference policy takes the device only while it runs."""
    fsdp_plan: FsdpPlan = FsdpPlan()
    """What is sharded."""
    ep_plan: ExpertPlan = ExpertPlan()
    """Which modules hold experts, with ``expert_parallel_size``."""
    cp_plan: ContextPlan = ContextPlan()
    """How sequences are split, with ``ulysses_parallel_size``."""
    memory: MemoryPlan = MemoryPlan()
    """What is computed again or in parts, to save memory."""
    module_patches: tuple[ModulePatch, ...] = ()
    """Functions of the model that are replaced before it is sharded; for the whole process, so all engines in it must
    agree."""

    @model_validator(mode="after")
    def _check_turbo(self) -> Self:
        if self.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} must be 1: the library leaves parameters that are "
                "split so out of FSDP, and their gradients are never averaged; use fully_shard_parallel_size, or "
                "backend=megatron"
            )
        if self.kv_allgather_parallel_size != 1:
            raise ValueError(
                f"kv_allgather_parallel_size={self.kv_allgather_parallel_size} must be 1: it is not proven to compute "
                "the right attention; use ulysses_parallel_size or sequence_parallel_size"
            )
        self._check_context()
        self._check_experts()
        if self.memory.chunk_batch is not None and self.router_replay:
            raise ValueError(
                "memory.chunk_batch and router_replay=true: experts are given for whole micro-batches; leave out one"
            )
        if self.memory.chunk_batch is not None and self.packing:
            raise ValueError("memory.chunk_batch cuts rows, and packed sequences are one: set packing=false")
        return self

    def _check_context(self) -> None:
        plan, size = self.cp_plan, self.ulysses_parallel_size
        if size == 1:
            if plan != ContextPlan():
                raise ValueError("cp_plan is for ulysses_parallel_size of 2 or more, and it is 1")
            return
        if self.sequence_parallel_size > 1:
            raise ValueError(
                f"ulysses_parallel_size={size} and sequence_parallel_size={self.sequence_parallel_size}: tokens would "
                "be split twice; set one of them to 1"
            )
        if not plan.ulysses_function_patches:
            raise ValueError(
                f"ulysses_parallel_size={size} needs cp_plan.ulysses_function_patches: without them no attention sees "
                "the tokens of other ranks. For models with plain attention sequence_parallel_size needs no patches"
            )
        if plan.tokens_split_by == "model" and self.packing:
            raise ValueError(
                "cp_plan.tokens_split_by=model needs packing=false: such a model takes whole padded sequences"
            )

    def _check_experts(self) -> None:
        if self.expert_parallel_size == 1:
            if self.expert_fully_shard_parallel_size > 1 or self.ep_plan != ExpertPlan():
                raise ValueError(
                    "expert_fully_shard_parallel_size and ep_plan are for expert_parallel_size of 2 or more, and it is "
                    "1: experts are then sharded like everything else"
                )
            return
        if not self.ep_plan.apply_modules:
            raise ValueError(
                f"expert_parallel_size={self.expert_parallel_size} needs ep_plan.apply_modules: the modules that hold "
                "experts, such as model.layers.{*}.mlp.experts"
            )
        if self.lora is not None:
            raise ValueError("lora with expert_parallel_size above 1 is not proven; set one of them only")

    def data_parallel_ranks(self, world_size: int) -> tuple[int, ...]:
        """Give neighbours that split a sequence the same data."""
        together = self.sequence_parallel_size * self.ulysses_parallel_size
        return tuple(rank // together for rank in range(world_size))

    def sequence_ranks(self, world_size: int) -> tuple[int, ...]:
        """Split sequences over neighbours, by either means."""
        together = self.sequence_parallel_size * self.ulysses_parallel_size
        return tuple(rank % together for rank in range(world_size))

    def validate_world(self, world_size: int) -> None:
        """Check that groups of ranks come out even; see the base class."""
        super().validate_world(world_size)
        require_divisor("fully_shard_parallel_size", self.fully_shard_parallel_size or 1, world_size)
        require_divisor("ulysses_parallel_size", self.ulysses_parallel_size, world_size)
        require_divisor("expert_parallel_size", self.expert_parallel_size, world_size)
        require_divisor(
            "expert_parallel_size * engine.expert_fully_shard_parallel_size",
            self.expert_parallel_size * self.expert_fully_shard_parallel_size,
            world_size,
        )

    @property
    def stays_on_cpu(self) -> bool:
        """Whether weights, gradients and optimizer state lie on the CPU at all times."""
        return self.offload_policy or self.forward_only

    def resolved_framework_config(self, num_ranks: int) -> dict[str, Any]:
        """Say what the library is given; see the base class."""
        self.validate_world(num_ranks)
        return library_config(self, num_ranks, self.device)
