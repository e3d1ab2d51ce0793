"""A micro-batch as Megatron's GPTModel takes it.

Shape legend: T tokens of the micro-batch, t those that this rank runs (all with tensor parallelism, a part with context
parallelism), m loss tokens that it predicts, N ids whose log-probs are asked for in the place of each.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.top_k import scored_ids
from verl_megatron_mindspeed.forward.places import find_places
from verl_megatron_mindspeed.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Layout:
    """What goes into the model, and where in its output the loss tokens are predicted."""

    batch: PackedBatch
    input_ids: torch.Tensor
    """[1, t] int64."""
    position_ids: torch.Tensor
    """[1, t] int64."""
    packed: PackedSeqParams
    """Where sequences begin, counted over all ranks that split them."""
    rows: torch.Tensor
    """[max(m, 1)] int64: indices among the t of the tokens that predict a loss token, each the one before it. Where
    there is none, one that predicts nothing: kernels never get matrices without rows."""
    targets: torch.Tensor
    """[max(m, 1), N] int64: the tokens that they predict, and other ids; see `scored_ids`."""
    loss_positions: torch.Tensor
    """[m] int64: indices of those among the T."""
    source: torch.Tensor
    """[t] int64: for each token that goes in its index among the T, -1 for filling."""
    is_filling: bool
    """Whether the micro-batch is only there to make up the number that the schedule needs."""


def lay_out(batch: PackedBatch, parallel: Parallel, *, sequence_parallel: bool, is_filling: bool = False) -> Layout:
    """Lay a micro-batch, the same on all ranks that split the model, out for this rank.

    With `sequence_parallel` tensor-parallel ranks divide the t tokens between them outside attention. No collectives;
    with context parallelism the host waits for the device once.
    """
    context, device = parallel.context, batch.input_ids.device
    multiple = parallel.tensor.size if sequence_parallel else 1
    places = find_places(batch.lengths, context.size, context.rank, multiple)
    source_t, position_t, place_T = (
        torch.from_numpy(array).to(device) for array in (places.source, places.positions, places.place)
    )
    ids_t = torch.where(source_t < 0, 0, batch.input_ids[source_t.clamp_min(0)])
    losses = batch.loss_positions
    rows = place_T[losses - 1]
    if context.size > 1:
        is_own = rows >= 0
        rows, losses = rows[is_own], losses[is_own]
    targets = scored_ids(batch, losses)
    if not losses.numel():
        rows, targets = rows.new_zeros(1), targets.new_zeros(1, targets.shape[1])
    packed = _packed_sequences(places.lengths, device)
    return Layout(batch, ids_t[None], position_t[None], packed, rows, targets, losses, source_t, is_filling)


def _packed_sequences(lengths: tuple[int, ...], device: torch.device) -> PackedSeqParams:
    """Say where sequences begin; filling counts as theirs, since no real token looks at what comes after it."""
    begins = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=begins,
        cu_seqlens_kv=begins,
        cu_seqlens_q_padded=begins,
        cu_seqlens_kv_padded=begins,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
