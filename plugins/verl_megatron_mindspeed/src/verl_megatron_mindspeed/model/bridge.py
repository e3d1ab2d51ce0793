"""Which Megatron model a Hugging Face folder is: mbridge's knowledge, with our settings."""

from typing import Any, ClassVar, Final

import torch
from megatron.core.transformer import TransformerConfig
from transformers import PreTrainedConfig

from verl_engine.contract.errors import ConfigError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.hf_config import read_rotary
from verl_megatron_mindspeed.model.options import check_options

_WITHOUT_KERNELS: Final = {
    "moe_grouped_gemm": False,
    "persist_layer_norm": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
}
"""What the plain PyTorch layers lack, and mbridge turns on for some models."""


def make_bridge(config: MegatronConfig, hf_config: PreTrainedConfig, *, local: bool, device_kind: str) -> Any:
    """Make mbridge's bridge of a model that was checked, with a TransformerConfig after our config.

    With `local` the layers are those in plain PyTorch. ConfigError where ``transformer_options`` holds what
    TransformerConfig does not take.
    """
    from mbridge.core.bridge import _MODEL_REGISTRY  # mbridge imports all of its models, so only here

    check_options(config.transformer_options, local=local)
    own = _settings(config, local=local, device_kind=device_kind)
    settings = {**own, **_of_model(hf_config), **config.transformer_options}
    known = _MODEL_REGISTRY[hf_config.model_type]

    class OwnBridge(known):  # type: ignore[misc, valid-type]
        """mbridge's class, which is not touched: some of its methods change tables of the class."""

        _DIRECT_MAPPING: ClassVar = dict(known._DIRECT_MAPPING)  # noqa: SLF001 - it has no public access

        def _build_base_config(self, text_config_key: str | None = None, **kwargs: Any) -> TransformerConfig:
            return super()._build_base_config(text_config_key, **{**kwargs, **settings})

        def _get_gptmodel_args(self) -> dict[str, Any]:
            return _model_arguments(hf_config)

    try:
        return OwnBridge(hf_config, dtype=getattr(torch, config.param_dtype))
    except (AssertionError, ImportError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"engine: Megatron refuses this config for the model: {error}") from error


def _settings(config: MegatronConfig, *, local: bool, device_kind: str) -> dict[str, Any]:
    """Return the fields of TransformerConfig that follow from our config."""
    dtype = getattr(torch, config.param_dtype)
    has_virtual_stages = config.virtual_pipeline_parallel_size > 1
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        **config.parallel_sizes,
        **config.recompute_fields,
        "sequence_parallel": config.sequence_parallel,
        "calculate_per_token_loss": True,
        "variable_seq_lengths": True,
        "overlap_p2p_comm": has_virtual_stages,
        "batch_p2p_comm": False,
        # With virtual stages a send overlaps with what follows. Megatron-core 0.16 frees the output meanwhile, and the
        # next stage computes with whatever is in that memory (NVIDIA/Megatron-LM#4047).
        "deallocate_pipeline_outputs": not has_virtual_stages,
        "use_cpu_initialization": device_kind == "cpu",
        "perform_initialization": False,  # the folder's weights come anyway
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "transformer_impl": "local" if local else "transformer_engine",
        **({"attention_dropout": 0.0, "hidden_dropout": 0.0} if config.dropout == "off" else {}),
        **(_WITHOUT_KERNELS if local else {}),
    }


def _of_model(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """Return fields of TransformerConfig that mbridge does not take from the model's config."""
    if not getattr(hf_config, "num_experts_per_tok", None):
        return {}
    # Megatron's softmax over the chosen experts only is what transformers has when it norms their probabilities.
    fields = {"moe_router_pre_softmax": not hf_config.norm_topk_prob}
    if getattr(hf_config, "shared_expert_intermediate_size", None):
        # mbridge says nothing of the gate, and Megatron would leave it out silently.
        fields |= {"moe_shared_expert_gate": True, "moe_shared_expert_overlap": False}
    return fields


def _model_arguments(hf_config: PreTrainedConfig) -> dict[str, Any]:
    """Return GPTModel's arguments; mbridge reads a field that transformers 5 does not have any more."""
    rotary = read_rotary(hf_config)
    arguments = {
        "vocab_size": hf_config.vocab_size,
        "max_sequence_length": hf_config.max_position_embeddings,
        "position_embedding_type": "rope",
        "rotary_base": rotary.base,
    }
    if rotary.kind == "llama3":
        arguments |= {"rope_scaling": True, "rope_scaling_factor": rotary.settings["factor"]}
    return arguments
