"""How context-parallel ranks split a sequence, and how they see its other parts.

Each sequence is cut into twice as many pieces as there are ranks; a rank has one from the front and its mirror image
from the back, so all have the same work under causal attention. It is Transformer Engine's way for packed sequences.

Shape legend: t tokens of this rank, T those of all ranks together, K key-value heads, D head dim, L length of a
sequence, l this rank's part of it.
"""

from functools import lru_cache

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel


def gather_sequences(
    key: torch.Tensor, value: torch.Tensor, lengths: list[int], group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all tokens, [T, K, D] each, in the sequences' order, for [t, K, D] of each rank.

    Each of the `lengths`, over all ranks, is a multiple of twice the ranks. Gradients of all ranks are summed into each
    one's part. Collectives: an all-gather; a reduce-scatter in the backward.
    """
    both_tKD = torch.cat((key, value), dim=1)
    both_TKD = tensor_parallel.gather_from_sequence_parallel_region(both_tKD, group=group)
    order = _order(tuple(lengths), group.size()).to(key.device)
    found_key, found_value = both_TKD[order].chunk(2, dim=1)
    return found_key, found_value


def positions(length: int, num_parts: int, part: int) -> torch.Tensor:
    """Return [l] int64: which tokens of a sequence a rank has."""
    pieces = torch.arange(length).chunk(2 * num_parts)
    return torch.cat((pieces[part], pieces[2 * num_parts - 1 - part]))


def may_see(length: int, num_parts: int, part: int, device: torch.device) -> torch.Tensor:
    """Return [l, L] bool: True where a token of this rank may see a token of the sequence."""
    own = positions(length, num_parts, part).to(device)
    return own[:, None] >= torch.arange(length, device=device)[None, :]


@lru_cache(maxsize=4)  # all layers ask for the same
def _order(lengths: tuple[int, ...], num_parts: int) -> torch.Tensor:
    """Return [T] int64: where, among the ranks' tokens one rank after the other, the sequences' tokens lie."""
    order = torch.empty(sum(lengths), dtype=torch.int64)
    num_own = sum(lengths) // num_parts
    start = 0
    for length in lengths:
        for part in range(num_parts):
            first = part * num_own + start // num_parts
            order[start + positions(length, num_parts, part)] = torch.arange(first, first + length // num_parts)
        start += length
    return order
