"""``torch.distributed``, as Megatron's modules see it on a CPU: parts of different lengths, which gloo refuses.

Ranks that split experts' matrices exchange the tokens of their experts, of which each rank has another number.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def __getattr__(name: str) -> Any:
    """Hand through all the rest."""
    return getattr(dist, name)


def all_gather(tensors: Sequence[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """As torch's, where the first dims may differ: all are sent as long as the longest."""
    longest = max(len(part) for part in tensors)
    if all(len(part) == longest for part in tensors):
        dist.all_gather(list(tensors), tensor.contiguous(), group=group)
        return
    sent = tensor.new_zeros(longest, *tensor.shape[1:])
    sent[: len(tensor)] = tensor
    found = [torch.empty_like(sent) for _ in tensors]
    dist.all_gather(found, sent, group=group)
    for part, whole in zip(tensors, found, strict=True):
        part.copy_(whole[: len(part)])


def reduce_scatter(
    output: torch.Tensor, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """As torch's, where the first dims may differ: every rank gets all sums, and keeps its own."""
    if all(len(part) == len(tensors[0]) for part in tensors):
        dist.reduce_scatter(output, [part.contiguous() for part in tensors], group=group)
        return
    sums = torch.cat(tuple(tensors))
    dist.all_reduce(sums, group=group)
    output.copy_(sums.split([len(part) for part in tensors])[dist.get_rank(group)])
