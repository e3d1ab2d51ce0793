"""How a model attends: packed where that is right, else one sequence per row; never without what it needs."""

import logging
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from verl_engine.contract.bounded import divisors
from verl_engine.contract.errors import ModelError
from verl_engine.engine.exact_attention import needs_eager
from verl_fsdp.config import ShardedConfig
from verl_fsdp.forward.attention import PACKED_ATTENTION
from verl_fsdp.model.trial import tell_sequences_apart

_LOG = logging.getLogger(__name__)
_PACKABLE_LAYERS: Final = frozenset({"full_attention", "sliding_attention", "moe", "mlp", "dense", "sparse"})
"""Those of transformers' layer types in which tokens meet in plain causal attention only, or not at all."""


def choose_attention(model: PreTrainedModel, config: ShardedConfig) -> None:
    """Set the attention that the model is to run with; the result is in its config, see `is_packed`.

    A packed model mixes tokens by our attention only. A convolution or a recurrent state would run from one sequence
    into the next, and so would an attention that transformers' registry does not lead to. Such models get one sequence
    a row: right, though padded. In rows too, what transformers' sdpa would leave out (a soft cap) is computed eagerly.
    The model has its weights, in memory, as transformers loads it by default.

    Raises:
        ModelError: ``sequence_parallel_size`` needs packing, or does not divide the attention heads; or the model is
            no causal one, or too large to be tried.
    """
    in_rows = "eager" if needs_eager(model.config) else model.config._attn_implementation  # noqa: SLF001 - no public access
    reason = why_not_packed(model) if config.packing else "engine.packing=false"
    if reason is None:
        check_heads(model, config)
        reason = tell_sequences_apart(model, PACKED_ATTENTION)
    if reason is not None:
        if config.sequence_parallel_size > 1:
            raise ModelError(
                f"engine.sequence_parallel_size={config.sequence_parallel_size} splits packed sequences, and "
                f"{type(model).__name__} cannot be packed: {reason}; set engine.sequence_parallel_size=1"
            )
        if config.packing:
            _LOG.warning("%s runs one sequence per row, padded, not packed: %s", type(model).__name__, reason)
        reason = tell_sequences_apart(model, in_rows)
        if reason is not None:
            raise ModelError(f"{type(model).__name__} is not a causal language model that can be trained: {reason}")


def check_heads(model: PreTrainedModel, config: ShardedConfig) -> None:
    """Raise ModelError where the ranks that split sequences cannot divide the attention heads."""
    heads = getattr(model.config.get_text_config(decoder=True), "num_attention_heads", None)
    if isinstance(heads, int) and heads % config.sequence_parallel_size:
        raise ModelError(
            f"engine.sequence_parallel_size={config.sequence_parallel_size} does not divide the {heads} attention "
            f"heads of {type(model).__name__}; use one of {divisors(heads)}"
        )


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Say what would make packed sequences run into each other; None if nothing is known."""
    if not model._can_set_attn_implementation():  # noqa: SLF001 - such a model takes ours, and never calls it
        return "it computes attention in its own way, which cannot be told where sequences end"
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        return "it counts positions itself, from another number than 0"
    mixers = _other_mixers(model, model.config.get_text_config(decoder=True))
    return f"it has layers through which sequences would run into each other ({', '.join(mixers)})" if mixers else None


def _other_mixers(model: PreTrainedModel, text_config: Any) -> list[str]:
    """Name what makes tokens depend on earlier ones besides attention."""
    kinds = set(getattr(text_config, "layer_types", None) or ()) - _PACKABLE_LAYERS
    for module in model.modules():
        if isinstance(module, (torch.nn.Conv1d, torch.nn.RNNBase)):
            kinds.add(type(module).__name__)
    if getattr(model, "_is_stateful", False):  # transformers' mark
        kinds.add("a recurrent state")
    return sorted(kinds)
