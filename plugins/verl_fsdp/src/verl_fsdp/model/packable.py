"""Which models can be packed, and which split over ranks that share a micro-batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl_fsdp.config import ShardedConfig

_PACKABLE_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "moe", "mlp", "dense", "sparse"})
"""Those of transformers' layer types in which tokens meet in plain causal attention only, or not at all."""


def check_packable(model: PreTrainedModel, config: ShardedConfig) -> None:
    """Check that a packed model mixes tokens by our attention only, and that its heads divide.

    A convolution or a recurrent state runs from one packed sequence into the next, and stops short at the tokens of
    this rank, without a word. So does the attention of models that do not look theirs up in transformers' registry:
    they take the name of ours, and go on with their own. And models of RoBERTa's kind begin to count positions at 2.

    Raises:
        ModelError: the model cannot be packed, or ``sequence_parallel_size`` does not divide the attention heads.
    """
    if not config.packing:
        return
    name, text_config = type(model).__name__, model.config.get_text_config(decoder=True)
    without = "engine.packing=false"
    if config.sequence_parallel_size > 1:
        without += f" and engine.sequence_parallel_size=1 (it is {config.sequence_parallel_size})"
    if not model._can_set_attn_implementation():  # noqa: SLF001 - such a model takes ours, and never calls it
        raise ModelError(
            f"{name} computes attention in its own way, which cannot be told where packed sequences end; set {without}"
        )
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise ModelError(
            f"{name} counts positions itself, from another number than 0, and would take those of packed sequences for "
            f"its own; set {without}"
        )
    mixers = _other_mixers(model, text_config)
    if mixers:
        raise ModelError(
            f"{name} has layers through which packed sequences would run into each other ({', '.join(mixers)}): only "
            f"causal attention, with or without a sliding window, can be packed; set {without}"
        )
    heads = getattr(text_config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % config.sequence_parallel_size:
        allowed = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ModelError(
            f"engine.sequence_parallel_size={config.sequence_parallel_size} does not divide the {heads} attention "
            f"heads of {name}; use one of {allowed}"
        )


def _other_mixers(model: PreTrainedModel, text_config: Any) -> list[str]:
    """Name what makes tokens depend on earlier ones besides attention."""
    kinds = set(getattr(text_config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    for module in model.modules():
        if isinstance(module, (torch.nn.Conv1d, torch.nn.RNNBase)):
            kinds.add(type(module).__name__)
    if getattr(model, "_is_stateful", False):  # transformers' mark
        kinds.add("a recurrent state")
    return sorted(kinds)
