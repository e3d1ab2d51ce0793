"""Causal attention inside each sequence of a packed micro-batch, as a transformers attention function.

Sequences of one length lie side by side (see `PackedBatch`), so each run of them is one dense batch: no mask is built,
nothing is padded, and no token sees another sequence.

Shape legend: T packed tokens, H query heads, K key-value heads, D head dim, S sequences of a run, L their length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
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
    packed_runs: tuple[SegmentRun, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence.

    Args:
        module: the attention layer, for messages.
        query: [1, H, T, D].
        key: [1, K, T, D]; K divides H.
        value: [1, K, T, D].
        attention_mask: None: what may be seen follows from the runs.
        packed_runs: where the sequences lie; handed through the model's keyword arguments.
        scaling: of the scores; by default 1 / sqrt(D).
        dropout: probability.
        sliding_window: tokens that each token sees, itself included; None for all before it.
        kwargs: what else transformers passes; ignored unless it would change the result.
    Returns:
        [1, T, H, D], and None for the attention weights.
    Raises:
        ModelError: the layer needs something that this function does not compute.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses {name}, which packed attention does not compute; set "
                "engine.packing=false"
            )
    assert attention_mask is None, "packed attention builds no mask and takes none"
    outputs = []
    for run in packed_runs:
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
    return torch.cat(outputs, dim=1), None


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
