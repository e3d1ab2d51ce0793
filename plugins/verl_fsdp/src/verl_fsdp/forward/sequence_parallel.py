"""Splitting the tokens of a micro-batch over ranks, and bringing what they computed together.

Each rank of a sequence group runs its part of the tokens through everything that looks at one token at a time. Around
attention the ranks trade: tokens of all heads for all tokens of some heads, and back. So attention sees whole
sequences, and a token's layers one rank.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses".

Shape legend: T tokens of a micro-batch, filled up so that P, the ranks of the group, divides them; t = T / P those of
this rank; m loss tokens that this rank predicts, H query heads, h = H / P those of this rank, K key-value heads, k
those of this rank, D head dim, F numbers per token.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verl_engine.batch.packed import PackedBatch, SegmentRun


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """What one rank runs of a packed micro-batch."""

    input_ids: torch.Tensor
    """[t] int64."""
    position_ids: torch.Tensor
    """[t] or [axes, t] int64."""
    predictors: torch.Tensor
    """[m] int64: indices among the t of the tokens that predict a loss token, each its next."""
    loss_positions: torch.Tensor
    """[m] int64: indices, among all tokens of the micro-batch, of the tokens that they predict."""
    runs: tuple[SegmentRun, ...]
    """Where the sequences lie among the T tokens of the whole group, those that fill it up included."""


def slice_tokens(batch: PackedBatch, group: dist.ProcessGroup | None) -> TokenSlice:
    """Cut out this rank's tokens; all of them where there is no group.

    What fills the micro-batch up is a sequence of its own at the end, outside the loss: nothing looks at it, so it has
    no part in any gradient. No collectives; the host waits for the device once.
    """
    ids, positions, losses, runs = batch.input_ids, batch.position_ids, batch.loss_positions, batch.segment_runs
    if group is None:
        return TokenSlice(ids, positions, losses - 1, losses, runs)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    num_own = -(-batch.num_tokens // size)
    num_fill = num_own * size - batch.num_tokens
    if num_fill:
        ids = torch.cat([ids, ids.new_zeros(num_fill)])
        fill = torch.arange(num_fill, device=positions.device).expand(*positions.shape[:-1], -1)
        positions = torch.cat([positions, fill], dim=-1)
        runs = (*runs, SegmentRun(batch.num_tokens, 1, num_fill))
    own = slice(rank * num_own, (rank + 1) * num_own)
    # A loss token belongs to the rank that has the token before it.
    edges = torch.tensor([own.start + 1, own.stop + 1], device=losses.device)
    first, last = torch.searchsorted(losses, edges).tolist()
    losses = losses[first:last]
    return TokenSlice(ids[own], positions[..., own], losses - 1 - own.start, losses, runs)


def trade_tokens_for_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give away tokens for heads, before attention.

    Where key-value heads are too few to divide, each is sent to all ranks whose query heads need it.

    Args:
        query: [1, H, t, D].
        key: [1, K, t, D].
        value: [1, K, t, D]; D may differ.
        group: P ranks; P and K divide H.
    Returns:
        [1, h, T, D], [1, k, T, D], [1, k, T, D]: this rank's heads, k dividing h.
    Collectives: one all-to-all over the group, and one backward.
    """
    size = dist.get_world_size(group)
    repeats = math.lcm(key.shape[1], size) // key.shape[1]
    if repeats > 1:
        key, value = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    widths = [tensor.shape[1] // size * tensor.shape[3] for tensor in (query, key, value)]
    sent_PtF = torch.cat([_by_rank(tensor, size) for tensor in (query, key, value)], dim=-1)
    got_TF = _all_to_all(sent_PtF, group).flatten(0, 1)
    found = (
        part.unflatten(-1, (-1, tensor.shape[3])).transpose(0, 1)[None]
        for part, tensor in zip(got_TF.split(widths, dim=-1), (query, key, value), strict=True)
    )
    own_query, own_key, own_value = found
    return own_query, own_key, own_value


def trade_heads_for_tokens(output: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Give away heads for tokens, after attention.

    Args:
        output: [1, T, h, D].
        group: P ranks.
    Returns:
        [1, t, H, D].
    Collectives: one all-to-all over the group, and one backward.
    """
    size, heads = dist.get_world_size(group), output.shape[2]
    got_PtF = _all_to_all(output[0].flatten(1).unflatten(0, (size, -1)), group)
    by_token: torch.Tensor = got_PtF.unflatten(-1, (heads, -1)).transpose(0, 1)
    return by_token.flatten(1, 2)[None]


def _by_rank(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Turn [1, H, t, D] into [P, t, h * D]: what each rank gets."""
    by_rank: torch.Tensor = tensor[0].unflatten(0, (size, -1))
    return by_rank.transpose(1, 2).flatten(2)


def _all_to_all(blocks_PtF: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send block p to rank p; return [P, t, F], the blocks that the ranks sent here."""
    blocks: torch.Tensor = _AllToAll.apply(blocks_PtF, group)  # type: ignore[no-untyped-call]
    return blocks


class _AllToAll(torch.autograd.Function):
    """Its own inverse, and so its own backward."""

    @staticmethod
    def forward(ctx: Any, blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(gradients[0], ctx.group), None


def _exchange(blocks: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    sent = blocks.contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return got
