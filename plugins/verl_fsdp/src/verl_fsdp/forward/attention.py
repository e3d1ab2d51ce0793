"""Causal attention inside each sequence of a packed micro-batch, as a transformers attention function.

Sequences of one length lie side by side (see `PackedBatch`), so each run of them is one dense batch: no mask is built,
nothing is padded, and no token sees another sequence.

Shape legend: T packed tokens, t those of this rank where several split them (else T), H query heads, K key-value heads,
D head dim, S sequences of a run, L their length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from verl_engine.contract.errors import ModelError
from verl_fsdp.forward.sequence_parallel import trade_heads_for_tokens, trade_tokens_for_heads

if TYPE_CHECKING:
    import torch.distributed as dist

    from verl_engine.batch.packed import SegmentRun

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
            None for all before it; the rest is ignored unless it would change the result.
    Returns:
        [1, t, H, D], and None for the attention weights.
    Raises:
        ModelError: the layer needs something that this function does not compute.
    Collectives: with a sequence group an all-to-all before and one after, and the same backward.
    """
    runs = _refuse_what_would_be_wrong(module, packed_runs, kwargs)
    assert attention_mask is None, "packed attention builds no mask and takes none"
    if sequence_group is not None:
        query, key, value = trade_tokens_for_heads(query, key, value, sequence_group)
    if not query.shape[2] == key.shape[2] == runs[-1].stop:
        raise ModelError(
            f"{type(module).__name__} attends from {query.shape[2]} tokens to {key.shape[2]}, but the micro-batch has "
            f"{runs[-1].stop}: packed attention cannot tell them apart; set engine.packing=false"
        )
    sliding_window: int | None = kwargs.get("sliding_window")
    outputs = []
    for run in runs:
        q_SHLD, k_SKLD, v_SKLD = (_run_view(tensor, run) for tensor in (query, key, value))
        window = sliding_window is not None and run.length > sliding_window
        out_SHLD = scaled_dot_product_attention(
            q_SHLD,
            k_SKLD,
            v_SKLD,
            attn_mask=_window_mask(run.length, sliding_window, query.device) if window else None,
            dropout_p=dropout,
            is_causal=not window,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(out_SHLD.transpose(1, 2).reshape(1, run.num_sequences * run.length, *out_SHLD.shape[1::2]))
    output = torch.cat(outputs, dim=1)
    return output if sequence_group is None else trade_heads_for_tokens(output, sequence_group), None


def _refuse_what_would_be_wrong(
    module: torch.nn.Module, runs: tuple[SegmentRun, ...] | None, kwargs: dict[str, Any]
) -> tuple[SegmentRun, ...]:
    """Check that the layer asks for no more than causal attention, with a window at most, and return the runs."""
    name = type(module).__name__
    if runs is None:
        raise ModelError(
            f"{name} was not told where the packed sequences lie, and would mix them: its model does not hand "
            "packed_runs on to attention; set engine.packing=false"
        )
    for argument in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(argument) is not None:
            raise ModelError(
                f"{name} uses {argument}, which packed attention does not compute; set engine.packing=false"
            )
    if not kwargs.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError(f"{name} is not causal, and packed attention always is; set engine.packing=false")
    if "sliding_window" not in kwargs and _has_window(module):
        raise ModelError(
            f"{name} has a sliding window that it does not pass to attention (only to a mask, which packed attention "
            "does without); set engine.packing=false"
        )
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
    places = torch.arange(length, device=device)
    distance = places[:, None] - places[None, :]
    return (distance >= 0) & (distance < (window or length))


def _no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Stand in for transformers' mask builder."""


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)
