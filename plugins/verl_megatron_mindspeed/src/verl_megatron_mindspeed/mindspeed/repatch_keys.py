"""What MindSpeed is told of the engine: every argument that it decides its patches by, from the ``engine`` section."""

from typing import Any

import torch

from verl_megatron_mindspeed.config import MegatronConfig


def repatch_keys(config: MegatronConfig) -> dict[str, Any]:
    """Return the arguments for MindSpeed's ``repatch``, each said outright: it would keep what was said before.

    MindSpeed also takes those that are fields of Megatron's TransformerConfig for defaults of each one that is made.
    """
    dtype = getattr(torch, config.param_dtype)
    return {
        **config.transformer_options,
        **config.parallel_sizes,
        **config.recompute_fields,
        "context_parallel_algo": "megatron_cp_algo",
        "sequence_parallel": config.sequence_parallel,
        "variable_seq_lengths": config.pipeline_parallel_size > 1,
        "use_flash_attn": config.mindspeed.uses_flash_attention and config.transformer != "local",
        "use_flash_attn_npu_batch_invariant": config.mindspeed.batch_invariant_attention,
        "use_batch_invariant_ops": config.mindspeed.batch_invariant_ops,
        "attention_mask_type": "causal",
        "reset_attention_mask": False,
        "reset_position_ids": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype if config.pipeline_parallel_size > 1 else None,
        "bf16": config.param_dtype == "bfloat16",
        "fp16": config.param_dtype == "float16",
        "fp8_format": config.transformer_options.get("fp8"),  # MindSpeed looks for it under both names
        "fp8_reuse_quantized_weight": config.mindspeed.fp8_reuse_quantized_weight,
        "transformer_impl": "local" if config.transformer == "local" else "transformer_engine",
        "use_distributed_optimizer": config.distributed_optimizer,
        "overlap_grad_reduce": config.overlap_grad_reduce,
        "overlap_param_gather": config.overlap_param_gather,
        "calculate_per_token_loss": True,
        **config.mindspeed.features,
    }
