"""Which layers Megatron builds."""

from typing import Any, Final

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import rms_norm

from verl_engine.contract.errors import ConfigError
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.local_attention import PackedAttention

_RECOMPUTED_LOCALLY: Final = ("core_attn", "mlp", "moe", "shared_experts")
"""Of Megatron's ``recompute_modules`` those that need no Transformer Engine."""


class RMSNorm(torch.nn.Module):
    """Root mean square norm that works under sequence parallelism; Megatron's own wrapper of torch's refuses it.

    There each rank norms its part of the tokens, so its weight's gradient is a part too: the mark makes Megatron sum
    them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm the last dim; any shape, dtype kept."""
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)


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
    """Return Megatron's description of the layers of a part of the model; `stage` is None where it is the only one."""
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
