"""How MindSpeed patches Megatron: a part of the ``engine`` section that nothing but its adaptor reads."""

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from verl_engine.contract.strict_model import StrictModel

DERIVED_KEYS: Final = {
    "tensor_model_parallel_size": "engine.tensor_parallel_size",
    "pipeline_model_parallel_size": "engine.pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "engine.virtual_pipeline_parallel_size",
    "context_parallel_size": "engine.context_parallel_size",
    "context_parallel_algo": "engine.context_parallel_size, always as a ring: only it knows packed sequences",
    "expert_model_parallel_size": "engine.expert_parallel_size",
    "expert_tensor_parallel_size": "engine.expert_tensor_parallel_size",
    "sequence_parallel": "engine.sequence_parallel",
    "variable_seq_lengths": "engine.pipeline_parallel_size",
    "recompute_granularity": "engine.recompute",
    "recompute_method": "engine.recompute_method",
    "recompute_num_layers": "engine.recompute_num_layers",
    "recompute_modules": "engine.recompute_modules",
    "params_dtype": "engine.param_dtype",
    "pipeline_dtype": "engine.param_dtype",
    "bf16": "engine.param_dtype",
    "fp16": "engine.param_dtype",
    "transformer_impl": "engine.transformer",
    "use_distributed_optimizer": "engine.distributed_optimizer",
    "overlap_grad_reduce": "engine.overlap_grad_reduce",
    "overlap_param_gather": "engine.overlap_param_gather",
    "fp8_format": "engine.transformer_options.fp8",
    "use_flash_attn": "engine.mindspeed.flash_attention",
    "use_flash_attn_npu_batch_invariant": "engine.mindspeed.batch_invariant_attention",
    "use_batch_invariant_ops": "engine.mindspeed.batch_invariant_ops",
    "fp8_reuse_quantized_weight": "engine.mindspeed.fp8_reuse_quantized_weight",
    "calculate_per_token_loss": "the engine, which divides by the tokens of the whole batch itself",
    "attention_mask_type": "the engine, whose sequences are packed end to end and causal",
    "reset_attention_mask": "the engine, whose packed sequences carry their own boundaries",
    "reset_position_ids": "the engine, whose packed sequences carry their own positions",
}
"""Arguments of MindSpeed that a field decides, or the engine itself, and which."""

_SCHEDULE: Final = "it replaces Megatron's pipeline schedule, through which the engine accumulates gradients"
_LAYOUT: Final = "it lays out layers or experts in a way that this engine's map of weights does not know"
_MASTERS: Final = (
    "it changes the float32 master weights and optimizer state, which snapshots and checkpoints are made of"
)

REFUSED_FEATURES: Final = {
    "moe_fb_overlap": _SCHEDULE,
    "recompute_in_advance": _SCHEDULE,
    "recompute_in_bubble": _SCHEDULE,
    "schedules_method": _SCHEDULE,
    "automated_pipeline": _LAYOUT,
    "balanced_moe_experts": _LAYOUT,
    "enable_expert_placement": _LAYOUT,
    "layerzero": _LAYOUT,
    "moe_tp_extend_ep": _LAYOUT,
    "n_shared_experts": _LAYOUT,
    "noop_layers": _LAYOUT,
    "pipeline_num_transformer_layers": _LAYOUT,
    "tp_2d": _LAYOUT,
    "unaligned_linear": _LAYOUT,
    "use_torch_fsdp2": _LAYOUT,
    "optimizer_selection": _MASTERS,
    "quant_grads": _MASTERS,
    "quant_states": _MASTERS,
    "reuse_fp32_param": _MASTERS,
    "swap_optimizer": _MASTERS,
    "virtual_optimizer": _MASTERS,
    "ai_framework": "this engine is PyTorch's",
    "auto_settings": "it searches for settings in runs of its own",
    "dist_train": "it trains several models of different layouts, and this engine holds one",
}
"""Arguments of MindSpeed that this engine cannot live with, and why."""


class MindSpeedConfig(StrictModel):
    """Which of MindSpeed's patches are applied, beyond what the rest of the section already decides."""

    adaptor: Literal["auto", "mindspeed", "megatron_adaptor"] = "auto"
    """Which package patches Megatron: ``mindspeed`` (its module ``mindspeed.megatron_adaptor``), or
    ``megatron_adaptor``, which Ascend offers beside it from Megatron-core 0.17 on. ``auto`` takes the first of the two
    that is installed."""
    flash_attention: bool | None = None
    """Compute attention with the NPU's fused kernel. By default on, unless ``batch_invariant_attention`` is."""
    batch_invariant_attention: bool = False
    """Compute attention so that a sequence's result does not depend on what it is batched with, with flash-attn-npu:
    rollout and training then agree. Excludes ``flash_attention``, and context parallelism."""
    batch_invariant_ops: bool = False
    """The same for matrix products and sums, with batch_invariant_ops."""
    fp8_reuse_quantized_weight: bool = False
    """With FP8 (``transformer_options: {fp8: ...}``): quantize each weight once between optimizer steps and not at each
    use. Needs a MindSpeed that has it; its branch for Megatron-core 0.16 has not."""
    features: dict[str, bool | int | float | str | None] = Field(default_factory=dict)
    """Further arguments of MindSpeed by name, such as ``moe_alltoall_overlap_comm: true``; they are passed on as
    they are. Those that other fields decide are refused here, and so are unknown ones. Fields of Megatron's
    TransformerConfig belong into ``transformer_options``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in sorted(self.features):
            if name in DERIVED_KEYS:
                raise ValueError(f"features sets {name}, which is decided by {DERIVED_KEYS[name]}; leave it out here")
            if name in REFUSED_FEATURES:
                raise ValueError(f"features sets {name}, but {REFUSED_FEATURES[name]}; leave it out")
        if self.flash_attention and self.batch_invariant_attention:
            raise ValueError(
                "flash_attention=true and batch_invariant_attention=true both replace the same attention; set one"
            )
        return self

    @property
    def uses_flash_attention(self) -> bool:
        """Whether the fused kernel computes attention."""
        return not self.batch_invariant_attention if self.flash_attention is None else self.flash_attention

    def check_engine(self, context_parallel_size: int, transformer: str) -> None:
        """Raise ValueError where MindSpeed cannot compute the engine's attention, or nothing would use what was set."""
        asked = [name for name in ("flash_attention", "batch_invariant_attention") if getattr(self, name)]
        if transformer == "local" and asked:
            raise ValueError(
                f"mindspeed.{asked[0]}=true has no effect on transformer=local, whose attention is plain PyTorch; "
                "leave it out, or use transformer_engine or auto"
            )
        if context_parallel_size > 1 and transformer != "local" and not self.uses_flash_attention:
            is_invariant = self.batch_invariant_attention
            setting = "batch_invariant_attention=true" if is_invariant else "flash_attention=false"
            raise ValueError(
                f"mindspeed.{setting} does not go with context_parallel_size={context_parallel_size}: MindSpeed "
                "divides sequences in its flash attention only; set one of the two"
            )
