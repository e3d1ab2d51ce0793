"""How transformers' configs are made tiny: each field by its name, and what single architectures need besides."""

from __future__ import annotations

from typing import Any, Final

_SIZES: Final = """
 64 vocab_size decoder_vocab_size vocab_size_per_layer_input vocab_size_per_layer
  1 bos_token_id cls_token_id decoder_start_token_id
  2 eos_token_id sep_token_id
  0 pad_token_id
  8 pronunciation_vocab_size shape_vocab_size
 32 hidden_size d_model n_embd emb_dim embedding_dim word_embed_proj_dim embedding_size input_embedding_size
 32 output_embedding_size lru_width attention_hidden_size
 64 mamba_d_ssm intermediate_size ffn_dim dim_ff dff d_inner decoder_ffn_dim encoder_ffn_dim ffn_hidden_size
 64 feed_forward_size intermediate_size_mlp dense_intermediate_size
  8 hidden_size_per_layer_input pronunciation_embed_dim shape_embed_dim prompt_mid_dim
  4 laurel_rank
  2 num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_blocks num_decoder_layers
  2 num_encoder_layers num_layers_per_stack
  4 num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
  4 num_decoder_attention_heads num_encoder_attention_heads attention_heads swa_num_attention_heads rotary_dim
  4 index_topk index_block_size gated_norm_rank d_rel
  2 num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads o_groups
 16 index_n_heads
  2 index_topk_blocks
  8 head_dim dim_head swa_head_dim kv_channels attention_head_dim attention_head_size d_head query_pre_attn_scalar
  8 global_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim o_lora_rank rel_extent
 16 qk_head_dim kv_lora_rank q_lora_rank index_head_dim
128 max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions model_max_length
128 original_max_position_embeddings
 16 max_source_positions relative_max_distance position_bias_max_distance
  6 sliding_window sliding_window_size window_size attention_window_size attention_chunk_size keep_window_size
 12 local_attention
  8 local_attn_chunk_length lsh_attn_chunk_length num_buckets position_bias_num_buckets
  4 block_size
 16 moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size moe_shared_expert_intermediate_size
 16 shared_intermediate_size
  4 num_experts n_routed_experts num_local_experts moe_num_experts
  2 num_experts_per_tok num_experts_per_token moe_topk moe_k zero_expert_num
  1 n_group topk_group num_expert_group first_k_dense_replace moe_layer_start_index moe_layer_end_index
  8 router_hidden_size
  8 state_size ssm_state_size mamba_d_state linear_key_head_dim linear_value_head_dim linear_head_dim
  4 mamba_n_heads mamba_num_heads mamba_chunk_size chunk_size time_step_rank mamba_dt_rank linear_num_heads
  4 adapter_rank
 16 mamba_d_head mamba_head_dim mamba_headdim
  1 n_mamba_heads n_groups mamba_n_groups
  2 linear_num_key_heads linear_num_value_heads
"""
FIELDS: Final[dict[str, Any]] = {
    field: int(size) for size, *fields in map(str.split, _SIZES.strip().splitlines()) for field in fields
}
"""Everything that makes a model big; a config takes the fields that it has."""

KIND_LISTS: Final = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
"""Fields that name the kind of each layer."""

MLA: Final[dict[str, Any]] = {"num_key_value_heads": 4}
"""Of multi-head latent attention, told by the field ``kv_lora_rank``: as many key-value heads as query heads."""

_TEXT_ROPE: Final = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: Final[dict[str, dict[str, Any]]] = {
    "big_bird": {"attention_type": "original_full"},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _TEXT_ROPE | {"mrope_section": [2, 1, 1]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1},
    "gemma2": {"attn_logit_softcapping": 1.0},
    "gemma3": {
        "text_config": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6,
                        "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]},
        "vision_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4, "boi_token_index": 60, "eoi_token_index": 61, "image_token_index": 62,
    },
    "gemma3n_text": {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": None, "H_cycles": 1, "L_cycles": 1, "L_bp_cycles": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"moe_layers": [1], "no_rope_layers": [1, 0]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp_text": {"hc_lowrank": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 4, "indexer_compress_ratio": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 16]},
    "vaultgemma": {"attn_logit_softcapping": 1.0},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3,
              "attention_hidden_size": 64, "n_mamba_heads": 2, "attention_head_dim": 16},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "attention_hidden_size": 64, "n_mamba_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What single architectures need besides."""

_TEXT: Final = "reads images or sound too; its text model is here as "
SKIPPED: Final[dict[str, str]] = {
    "blt": "reads bytes in patches that another model cuts",
    "emu3": "draws images: no text model of its own",
    "gemma3n": f"{_TEXT}gemma3n_text",
    "gemma4": f"{_TEXT}gemma4_text",
    "gemma4_assistant": "drafts tokens for another model, whose states it reads",
    "gemma4_unified": f"{_TEXT}gemma4_unified_text",
    "gemma4_unified_assistant": "drafts tokens for another model, whose states it reads",
    "git": "describes images: no text model of its own",
    "got_ocr2": "reads images; its text model is here as qwen2",
    "gpt-sw3": "is gpt2",
    "llama4": f"{_TEXT}llama4_text",
    "mllama": "reads images, by layers of its own",
    "musicgen": "draws sound, conditioned on another model",
    "musicgen_melody": "draws sound, conditioned on another model",
    "phi4_multimodal": "reads images and sound; its text model is here as phi3",
    "qwen3_5": f"{_TEXT}qwen3_5_text",
    "qwen3_5_moe": f"{_TEXT}qwen3_5_moe_text",
    "qwen4_exp": f"{_TEXT}qwen4_exp_text",
}
"""What is left out, and why."""
