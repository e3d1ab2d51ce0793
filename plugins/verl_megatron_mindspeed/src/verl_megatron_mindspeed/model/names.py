"""Names of Megatron's weights: those of plain PyTorch layers, and those that mbridge knows."""

import re
from typing import Final

_LAYER: Final = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT: Final = re.compile(r"(\.experts\.local_experts\.|\.experts\.linear_fc[12]\.weight)(\d+)")
_FUSED: Final = (
    (re.compile(r"\.input_layernorm\.weight$"), ".self_attention.linear_qkv.layer_norm_weight"),
    (re.compile(r"\.local_experts\.(\d+)\.(linear_fc[12]\.weight)$"), r".\2\1"),
)
_FUSED_IN_DENSE: Final = (*_FUSED, (re.compile(r"\.pre_mlp_layernorm\.weight$"), ".mlp.linear_fc1.layer_norm_weight"))


def global_name(name: str, layers: list[int], first_expert: int) -> str:
    """Return the name in the whole model of a weight of one of this rank's parts, still in the words of its layers.

    `layers` are the numbers in the whole model, from 0, of the part's layers.
    """
    name = _LAYER.sub(lambda found: f"decoder.layers.{layers[int(found[1])]}.", name)
    return _EXPERT.sub(lambda found: f"{found[1]}{int(found[2]) + first_expert}", name)


def fused_name(name: str, *, experts: bool) -> str:
    """Return the name that a weight has in Transformer Engine's layers, which is the one that mbridge knows.

    They fuse norms, but the second of a mixture of `experts`, with what follows them, and experts with each other.
    """
    for pattern, fused in _FUSED if experts else _FUSED_IN_DENSE:
        name = pattern.sub(fused, name)
    return name
