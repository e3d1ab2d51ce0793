"""Causal attention inside each sequence of a packed micro-batch, as a transformers attention function.

Sequences of one length lie side by side (see `PackedBatch`), so each run of them is one dense batch: no mask is built,
nothing is padded, and no token sees another sequence. Scores with a soft cap, or with sinks, are computed eagerly.

Shape legend: T packed tokens, t those of this rank where several split them (else T), H query heads, K key-value heads,
D head dim, S sequences of a run, L their length.
"""

from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from verl_engine.batch.packed import SegmentRun
from verl_engine.contract.errors import ModelError
from verl_fsdp.forward.sequence_parallel import trade_heads_for_tokens, trade_tokens_for_heads

PACKED_ATTENTION: Final = "verl_packed"
"""Name to give as ``attn_implementation``."""


def packed_attention(  # noqa: PLR0913 - transformers' signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_runs: tuple[SegmentRun, ...] | None = None,
    sequence_group: dist.ProcessGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence.

    Args:
        module: the attention layer.
        query: [1, H, t, D].
        key: [1, K, t, D]; K divides H.
        value: [1, K, t, D].
        attention_mask: None: what may be seen follows from the runs.
        packed_runs: where the sequences lie among the T tokens; handed through the model's keyword arguments.
        sequence_group: the ranks that split the tokens; handed through likewise. None where nobody does.
        scaling: of the scores; by default 1 / sqrt(D).
        dropout: probability.
        kwargs: what else transformers passes: ``sliding_window``, the tokens that each token sees, itself included, or
            None for all before it; ``softcap`` of the scores; ``s_aux``, [H] scores of sinks that take a part of each
            softmax; the rest is ignored unless it would change the result, which raises ModelError.
    Returns:
        [1, t, H, D], and None for the attention weights.
    Collectives: with a sequence group an all-to-all before and one after, and the same backward.
    """
    runs = _refuse_what_would_be_wrong(module, packed_runs, kwargs)
    if attention_mask is not None:
        raise ModelError(f"{type(module).__name__} hides tokens by a mask of its own")
    sinks: torch.Tensor | None = kwargs.get("s_aux")
    if sequence_group is not None:
        query, key, value = trade_tokens_for_heads(query, key, value, sequence_group)
        if sinks is not None:
            sinks = sinks.chunk(dist.get_world_size(sequence_group))[dist.get_rank(sequence_group)]
    if not query.shape[2] == key.shape[2] == runs[-1].stop:
        raise ModelError(
            f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]}, but the micro-batch has "
            f"{runs[-1].stop}: packed attention cannot tell them apart"
        )
    outputs = []
    for run in runs:
        out_SHLD = _attend(
            *(_run_view(tensor, run) for tensor in (query, key, value)),
            window=kwargs.get("sliding_window"),
            scaling=scaling,
            dropout=dropout,
            softcap=kwargs.get("softcap"),
            sinks_H=sinks,
        )
        outputs.append(out_SHLD.transpose(1, 2).reshape(1, run.num_sequences * run.length, *out_SHLD.shape[1::2]))
    output = torch.cat(outputs, dim=1)
    return output if sequence_group is None else trade_heads_for_tokens(output, sequence_group), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attend in a dense batch of [S, H or K, L, D]; return [S, H, L, D]."""
    length = query.shape[2]
    is_windowed = window is not None and length > window
    if softcap is None and sinks_H is None:
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_window_mask(length, window, query.device) if is_windowed else None,
            dropout_p=dropout,
            is_causal=not is_windowed,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    probs_SHLL = _probabilities(query, key, _window_mask(length, window, query.device), scaling, softcap, sinks_H)
    return torch.nn.functional.dropout(probs_SHLL, dropout) @ _for_each_query_head(value, query.shape[1])


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    mask_LL: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Compute what sdpa cannot: [S, H, L, L] in the dtype of the queries, the softmax in float32.

    Source: ``eager_attention_forward`` of transformers' Gemma 2 (soft cap) and gpt-oss (sinks).
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ _for_each_query_head(key, query.shape[1]).transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask_LL, -torch.inf)
    if sinks_H is not None:
        scores = torch.cat([scores, sinks_H.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return scores.softmax(dim=-1, dtype=torch.float32)[..., : mask_LL.shape[0]].to(query.dtype)


def _for_each_query_head(states_SKLD: torch.Tensor, num_heads: int) -> torch.Tensor:
    return states_SKLD.repeat_interleave(num_heads // states_SKLD.shape[1], dim=1)


def _refuse_what_would_be_wrong(
    module: torch.nn.Module, runs: tuple[SegmentRun, ...] | None, kwargs: dict[str, Any]
) -> tuple[SegmentRun, ...]:
    """Check that the layer asks for no more than what is computed here, and return the runs."""
    name = type(module).__name__
    if runs is None:
        raise ModelError(
            f"{name} was not told where the packed sequences lie, and would mix them: its model does not hand "
            "packed_runs on to attention"
        )
    is_causal = kwargs.get("is_causal", getattr(module, "is_causal", True))
    hides_window = "sliding_window" not in kwargs and _has_window(module)
    problems = (
        (kwargs.get("position_bias") is not None, "uses position_bias, which packed attention does not compute"),
        (not is_causal, "is not causal, and packed attention always is"),
        (hides_window, "has a sliding window that it does not pass to attention (only to a mask, which has no effect)"),
    )
    for is_there, problem in problems:
        if is_there:
            raise ModelError(f"{name} {problem}")
    return runs


def _has_window(module: torch.nn.Module) -> bool:
    """Whether the model's config gives this layer a sliding window."""
    config = getattr(module, "config", None)
    if getattr(config, "sliding_window", None) is None:
        return False
    layer_types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    return layer_types is None or index is None or layer_types[index] == "sliding_attention"


def _run_view(tensor: torch.Tensor, run: SegmentRun) -> torch.Tensor:
    """View the tokens of a run of [1, heads, T, D] as [S, heads, L, D]."""
    part: torch.Tensor = tensor[0, :, run.start : run.stop]
    return part.reshape(part.shape[0], run.num_sequences, run.length, part.shape[2]).transpose(0, 1)


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return [L, L] bool: True where token i (row) may see token j (column): i - window < j <= i."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None, :]
    return (distance >= 0) & (distance < (window or length))


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for transformers' mask builder."""


def is_packed(model: PreTrainedModel) -> bool:
    """Whether `verl_fsdp.model.packable.choose_attention` found that sequences can lie end to end."""
    return bool(model.config._attn_implementation == PACKED_ATTENTION)  # noqa: SLF001 - no public access


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
