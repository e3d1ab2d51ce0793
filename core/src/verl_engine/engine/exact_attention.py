"""Which models transformers' sdpa does not compute as their authors meant. For trainers and rollouts alike."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_KNOWN_LAYERS: Final = frozenset(
    ("full_attention", "sliding_attention", "chunked_attention", "indexed_attention", "linear_attention", "conv",
     "hybrid", "hybrid_sliding", "moe", "mlp", "dense", "sparse")
)  # fmt: skip
"""Those of transformers' layer types that sdpa computes as eager attention does."""


def needs_eager(config: PreTrainedConfig) -> bool:
    """Whether sdpa would silently leave something out: a soft cap of scores, or what an unknown kind of layer does."""
    text_config = config.get_text_config(decoder=True)
    if getattr(text_config, "attn_logit_softcapping", None):
        return True
    return bool(set(getattr(text_config, "layer_types", None) or ()) - _KNOWN_LAYERS)
