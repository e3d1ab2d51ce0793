"""Which fields of Megatron's TransformerConfig ``transformer_options`` may set."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Final

from megatron.core.transformer import TransformerConfig

from verl_engine.contract.errors import ConfigError

_OF_MODEL: Final = """
    activation_func activation_func_clamp_value add_bias_linear add_qkv_bias apply_residual_connection_post_layernorm
    attention_output_gate experimental_attention_variant ffn_hidden_size gated_linear_unit glu_linear_offset
    heterogeneous_block_specs hidden_dropout hidden_size is_hybrid_model kv_channels layernorm_epsilon
    layernorm_zero_centered_gamma linear_attention_freq moe_ffn_hidden_size moe_latent_size moe_layer_freq
    moe_router_enable_expert_bias moe_router_group_topk moe_router_num_groups moe_router_pre_softmax
    moe_router_score_function moe_router_topk moe_router_topk_scaling_factor moe_shared_expert_gate
    moe_shared_expert_intermediate_size mrope_section mtp_num_layers multi_latent_attention no_rope_freq normalization
    num_attention_heads num_layers num_moe_experts num_query_groups qk_l2_norm qk_layernorm rotary_interleaved
    softmax_scale softmax_type window_attn_skip_freq window_size
"""
_OF_ENGINE: Final = """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split autocast_dtype batch_p2p_comm
    cuda_graph_impl cuda_graph_scope deallocate_pipeline_outputs enable_autocast enable_cuda_graph
    external_cuda_graph finalize_model_grads_func grad_scale_func grad_sync_func hybrid_context_parallel
    init_model_with_meta_device microbatch_group_size_per_vp_stage moe_extended_tp moe_use_legacy_grouped_gemm
    no_sync_func num_microbatches_with_partial_activation_checkpoints overlap_moe_expert_parallel_comm
    overlap_p2p_comm overlap_p2p_comm_warmup_flush param_sync_func perform_initialization
    pipeline_model_parallel_layout timers use_cpu_initialization use_ring_exchange_p2p
"""
_NEEDS_KERNELS: Final = """
    apply_rope_fusion cpu_offloading fused_single_qkv_rope gradient_accumulation_fusion moe_grouped_gemm
    moe_permute_fusion moe_router_fusion test_mode use_kitchen
"""
"""The layers in plain PyTorch have no such kernels; most of them Megatron would miss in the first forward only."""
_OF_LOSS: Final = "moe_aux_loss_coeff moe_router_load_balancing_type moe_z_loss_coeff"
_REFUSED: Final = (
    (_OF_MODEL, "it says which model it is, and that is the model folder's to say"),
    (_OF_ENGINE, "the engine sets it itself, and its work rests on it"),
    (_OF_LOSS, "it would add to the gradient what no loss of the job says, and by the micro-batch"),
)
"""Fields that nobody may set, and why."""


def check_options(options: Mapping[str, Any], *, local: bool) -> None:
    """Refuse names of ``transformer_options`` that TransformerConfig lacks, or that are not for the config to decide.

    What fields of the engine decide, the config refuses already.
    """
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    for name in sorted(options):
        where = f"engine.transformer_options.{name}"
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else "; leave it out"
            raise ConfigError(f"{where}: Megatron's TransformerConfig has no such field{hint}")
        for names, reason in _REFUSED:
            if name in names.split():
                raise ConfigError(f"{where}: {reason}; leave it out")
        if local and name in _NEEDS_KERNELS.split() and options[name]:
            raise ConfigError(
                f"{where}=true needs Transformer Engine, and the layers are those in plain PyTorch; leave it out"
            )
