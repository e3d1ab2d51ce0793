"""The ``engine`` section of the backend megatron. Imports no torch, and no Megatron."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from verl_engine.contract.bounded import Count, Ranks
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError
from verl_megatron_mindspeed.mindspeed_config import DERIVED_KEYS, MindSpeedConfig


class MegatronConfig(EngineConfig):
    """Megatron-core; on NPUs patched by MindSpeed."""

    backend: Literal["megatron"] = "megatron"
    """Fixed: this section is for ``megatron``."""
    param_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the model is stored and computed in. Master weights, gradient accumulation and reduction stay float32;
    ``float16`` adds a dynamic loss scale."""

    tensor_parallel_size: Ranks = 1
    """Ranks that split each layer's matrices (TP); it divides the model's attention and key-value heads."""
    pipeline_parallel_size: Ranks = 1
    """Ranks that each hold a part of the layers (PP); it divides their number, unless
    ``transformer_options: {num_layers_in_first_pipeline_stage: ..., num_layers_in_last_pipeline_stage: ...}`` gives the
    first or last another one."""
    virtual_pipeline_parallel_size: Ranks = 1
    """Parts of the layers that each pipeline rank holds (VPP): more parts, smaller bubbles, more traffic. Micro-batches
    are filled up with empty ones to a multiple of ``pipeline_parallel_size``."""
    context_parallel_size: Ranks = 1
    """Ranks that split each sequence (CP), for long ones."""
    expert_parallel_size: Ranks = 1
    """Ranks that divide the experts of a mixture-of-experts model (EP)."""
    expert_tensor_parallel_size: Ranks | None = None
    """Ranks that split each expert's matrices; by default as many as ``tensor_parallel_size``."""
    sequence_parallel: bool = False
    """Split what tensor parallelism leaves whole, norms and dropout, along the tokens: less memory, equal traffic."""

    distributed_optimizer: bool = True
    """Divide master weights and optimizer state among the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the last backward still runs."""
    overlap_param_gather: bool = False
    """Gather updated weights while the next forward runs. Needs ``distributed_optimizer`` and
    ``overlap_grad_reduce``."""
    count_zeros: bool = False
    """Report how many entries of the gradient are zero with each step; takes a pass over it."""

    recompute: Literal["off", "full", "selective"] = "off"
    """Compute activations again in the backward: of whole layers, or of ``recompute_modules`` only."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With ``recompute: full``: keep the input of every ``recompute_num_layers``-th layer, or recompute only the first
    so many layers of each pipeline part."""
    recompute_num_layers: Count = 1
    """See ``recompute_method``."""
    recompute_modules: tuple[str, ...] = ("core_attn",)
    """With ``recompute: selective``: which parts of a layer, in Megatron's words."""

    transformer: Literal["auto", "local", "transformer_engine"] = "auto"
    """Which layers Megatron builds: those of Transformer Engine (or of MindSpeed in its place), or ``local`` ones in
    plain PyTorch, which run everywhere. ``auto`` takes the first where they are installed."""
    transformer_options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron's TransformerConfig, such as ``moe_router_dtype: fp32``."""
    mindspeed: MindSpeedConfig = MindSpeedConfig()
    """How MindSpeed patches Megatron; on NPUs only."""

    @model_validator(mode="after")
    def _check_megatron(self) -> Self:
        for option in sorted(self.transformer_options.keys() & DERIVED_KEYS.keys()):
            raise ValueError(f"transformer_options sets {option}, which is decided by {DERIVED_KEYS[option]}")
        for option in ("moe_router_fusion", "moe_expert_capacity_factor"):
            if self.router_replay and self.transformer_options.get(option):
                raise ValueError(
                    f"transformer_options.{option} and router_replay=true: tokens would not all go through the experts "
                    "that they are given; leave out one"
                )
        if self.virtual_pipeline_parallel_size > 1 and self.pipeline_parallel_size == 1:
            raise ValueError(
                f"virtual_pipeline_parallel_size={self.virtual_pipeline_parallel_size} needs pipeline_parallel_size of "
                "2 or more"
            )
        if self.expert_parallel_size == 1 and self.expert_tensor_ranks != self.tensor_parallel_size:
            # Megatron reduces experts that are whole on each rank as if they saw the tokens of all of them.
            raise ValueError(
                f"expert_tensor_parallel_size={self.expert_tensor_parallel_size} may differ from tensor_parallel_size="
                f"{self.tensor_parallel_size} with expert_parallel_size of 2 or more only: Megatron would leave the "
                "experts' gradients in parts; leave it out"
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError("sequence_parallel=true needs tensor_parallel_size of 2 or more")
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather=true needs distributed_optimizer=true and overlap_grad_reduce=true")
        self._check_recompute()
        if self.transformer == "transformer_engine" and self.device == "cpu":
            raise ValueError("transformer=transformer_engine does not run on device=cpu; use auto or local")
        self.mindspeed.check_engine(self.context_parallel_size, self.transformer)
        if self.mindspeed != MindSpeedConfig() and self.device in ("cpu", "cuda"):
            raise ValueError(f"mindspeed is for device=npu, and it is {self.device}; leave the section out")
        return self

    def _check_recompute(self) -> None:
        for name, needed in (
            ("recompute_method", "full"),
            ("recompute_num_layers", "full"),
            ("recompute_modules", "selective"),
        ):
            value = getattr(self, name)
            if self.recompute != needed and value != type(self).model_fields[name].default:
                raise ValueError(f"{name}={value} is for recompute={needed}, and it is {self.recompute}")

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that split each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def parallel_sizes(self) -> dict[str, int | None]:
        """How the ranks divide the model, by Megatron's names."""
        virtual = self.virtual_pipeline_parallel_size
        return {
            "tensor_model_parallel_size": self.tensor_parallel_size,
            "pipeline_model_parallel_size": self.pipeline_parallel_size,
            "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
            "context_parallel_size": self.context_parallel_size,
            "expert_model_parallel_size": self.expert_parallel_size,
            "expert_tensor_parallel_size": self.expert_tensor_ranks,
        }

    @property
    def recompute_fields(self) -> dict[str, Any]:
        """What is recomputed, by Megatron's names; None for what plays no part."""
        is_full = self.recompute == "full"
        return {
            "recompute_granularity": None if self.recompute == "off" else self.recompute,
            "recompute_method": self.recompute_method if is_full else None,
            "recompute_num_layers": self.recompute_num_layers if is_full else None,
            "recompute_modules": list(self.recompute_modules) if self.recompute == "selective" else None,
        }

    def data_parallel_ranks(self, world_size: int) -> tuple[int, ...]:
        """Give ranks that split a model the same data; Megatron's order is TP fastest, then CP, DP, PP."""
        model_ranks = self.tensor_parallel_size * self.context_parallel_size
        num_ranks = max(1, world_size // (model_ranks * self.pipeline_parallel_size))
        return tuple(rank // model_ranks % num_ranks for rank in range(world_size))

    def sequence_ranks(self, world_size: int) -> tuple[int, ...]:
        """Split sequences over context-parallel ranks; see `data_parallel_ranks` for their order."""
        return tuple(rank // self.tensor_parallel_size % self.context_parallel_size for rank in range(world_size))

    def ranks_with_outputs(self, world_size: int) -> tuple[bool, ...]:
        """Compute outputs in the last pipeline stage: the last of the ranks, as that order has it."""
        stage = world_size // self.pipeline_parallel_size
        return tuple(rank >= world_size - stage for rank in range(world_size))

    def validate_world(self, world_size: int) -> None:
        """Check that the ranks can be divided as configured; see the base class."""
        self._divide(
            world_size,
            "tensor_parallel_size * context_parallel_size * pipeline_parallel_size",
            (self.tensor_parallel_size, self.context_parallel_size, self.pipeline_parallel_size),
        )
        if self.expert_parallel_size > 1:
            self._divide(
                world_size,
                "expert_tensor_parallel_size * expert_parallel_size * pipeline_parallel_size",
                (self.expert_tensor_ranks, self.expert_parallel_size, self.pipeline_parallel_size),
            )

    @staticmethod
    def _divide(world_size: int, names: str, sizes: tuple[int, int, int]) -> None:
        product = sizes[0] * sizes[1] * sizes[2]
        if world_size % product:
            raise ConfigError(
                f"engine.{names} = {' * '.join(map(str, sizes))} = {product} does not divide the {world_size} ranks; "
                f"use a multiple of {product} ranks (trainer.num_ranks of a job), or smaller sizes"
            )
