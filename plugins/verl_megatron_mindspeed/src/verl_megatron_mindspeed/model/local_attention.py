"""Causal attention inside each sequence of a packed micro-batch, in plain PyTorch, for Megatron's layers.

Shape legend: t tokens of this rank, T those of all context-parallel ranks together, H query heads and K key-value heads
of this rank, D head dim, S sequences of a run, L their length, l this rank's part of it.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import groupby, pairwise
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from verl_megatron_mindspeed.model.zigzag import gather_sequences, may_see


class PackedAttention(torch.nn.Module):
    """Megatron's core attention: what happens between queries, keys and values.

    Megatron's own in plain PyTorch takes neither packed sequences nor context parallelism. Here each run of sequences
    of one length is one dense batch, and the ranks that split the sequences gather all keys and values.
    """

    def __init__(
        self, *, config: TransformerConfig, softmax_scale: float | None = None, pg_collection: Any, **_: Any
    ) -> None:
        """Take what it needs of Megatron's arguments; it has no weights. `softmax_scale` is 1 / sqrt(D) by default."""
        super().__init__()
        self._scale = softmax_scale
        self._dropout = config.attention_dropout
        self._whole_block_forked = config.sequence_parallel
        self._context = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None,
        **_: Any,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: [t, H, D].
            key: [t, K, D]; K divides H.
            value: [t, K, D].
            attention_mask: None: what may be seen follows from where the sequences lie.
            packed_seq_params: where they lie among the T tokens.
        Returns:
            [t, H * D].
        Collectives: with context parallelism an all-gather of keys and values, and a reduce-scatter in the backward.
        """
        assert attention_mask is None, "packed attention builds no mask and takes none"
        assert packed_seq_params is not None, "these layers run packed sequences only"
        lengths = _lengths(packed_seq_params)
        num_parts, part = self._context.size(), self._context.rank()
        if num_parts > 1:
            key, value = gather_sequences(key, value, lengths, self._context)
        outputs, start = [], 0
        with self._dropped_alike():
            for length, run in groupby(lengths):
                size = length * sum(1 for _ in run)
                mask = may_see(length, num_parts, part, query.device) if num_parts > 1 else None
                queries = query[start // num_parts : (start + size) // num_parts]
                keys, values = (tensor[start : start + size] for tensor in (key, value))
                own = _batch(queries, length // num_parts)
                outputs.append(self._attend(own, _batch(keys, length), _batch(values, length), mask))
                start += size
        return torch.cat(outputs)

    def _attend(
        self, q_SHlD: torch.Tensor, k_SKLD: torch.Tensor, v_SKLD: torch.Tensor, mask_lL: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [S * l, H * D]."""
        out_SHlD = scaled_dot_product_attention(
            q_SHlD,
            k_SKLD,
            v_SKLD,
            attn_mask=mask_lL,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=mask_lL is None,
            scale=self._scale,
            enable_gqa=q_SHlD.shape[1] != k_SKLD.shape[1],
        )
        return out_SHlD.transpose(1, 2).flatten(2).flatten(0, 1)

    def _dropped_alike(self) -> AbstractContextManager[None]:
        """Draw dropout from this tensor-parallel rank's random numbers; under sequence parallelism Megatron does so."""
        if self._whole_block_forked or not self._dropout or not self.training:
            return nullcontext()
        context: AbstractContextManager[None] = tensor_parallel.get_cuda_rng_tracker().fork()
        return context


def _lengths(packed_seq_params: PackedSeqParams) -> list[int]:
    """Return the sequences' lengths, padding included, over all context-parallel ranks; empty ones left out."""
    bounds = packed_seq_params.cu_seqlens_q_padded
    bounds = packed_seq_params.cu_seqlens_q if bounds is None else bounds
    return [stop - start for start, stop in pairwise(bounds.tolist()) if stop > start]


def _batch(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """View [S * length, heads, D] as [S, heads, length, D]."""
    return tensor.view(-1, length, *tensor.shape[1:]).transpose(1, 2)
