"""Which layers Megatron builds."""

from typing import Any, Final

from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig

from verl_engine.contract.errors import ConfigError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.local_attention import PackedAttention
from verl_megatron_mindspeed.model.local_norm import RMSNorm

_RECOMPUTED_LOCALLY: Final = ("core_attn", "mlp", "moe", "shared_experts")
"""Of Megatron's ``recompute_modules`` those that need no Transformer Engine."""


def takes_local_layers(config: MegatronConfig, device_kind: str) -> bool:
    """Whether the layers are those in plain PyTorch.

    Raises:
        ConfigError: Transformer Engine's are asked for, and it is not installed or does not run here; or they are
            those in plain PyTorch, and something is to be recomputed for which Megatron needs Transformer Engine.
    """
    if config.transformer == "transformer_engine":
        if device_kind == "cpu":
            raise ConfigError(
                "engine.transformer=transformer_engine does not run on the CPU, and that is the only device here; use "
                "auto or local"
            )
        if not transformer_engine.HAVE_TE:
            raise ConfigError(
                "engine.transformer=transformer_engine, and Megatron finds no Transformer Engine; install "
                "transformer-engine[pytorch], or use auto or local"
            )
    local = config.transformer == "local" or device_kind == "cpu" or not transformer_engine.HAVE_TE
    if local:
        _check_recompute(config)
    return local


def _check_recompute(config: MegatronConfig) -> None:
    """Refuse what Megatron recomputes by a way that reaches into Transformer Engine, and fails in the first forward."""
    for module in config.recompute_modules:
        if module not in _RECOMPUTED_LOCALLY:
            raise ConfigError(
                f"engine.recompute_modules names {module!r}, which layers in plain PyTorch cannot recompute; use "
                f"{', '.join(_RECOMPUTED_LOCALLY)}, or recompute: full"
            )


def block_spec(transformer: TransformerConfig, stage: int | None, *, local: bool) -> Any:
    """Return Megatron's description of the layers of one part of the model.

    Args:
        transformer: of the whole model.
        stage: number of the part among this rank's; None where it has a single one.
        local: whether the layers are those in plain PyTorch.
    """
    spec = get_gpt_decoder_block_spec(
        transformer, use_transformer_engine=not local, normalization="RMSNorm", vp_stage=stage
    )
    if local:
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs:
            _replace(layer.submodules, transformer)
    return spec


def _replace(layer: Any, transformer: TransformerConfig) -> None:
    """Put our norm and attention into a layer's description; Megatron's own know no sequence parallelism or packing."""
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if transformer.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
