"""Per-token numbers that several ranks split among them, brought together with the right gradient."""

from typing import Any

import torch
import torch.distributed as dist


def sum_over_group(parts: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Bring the numbers of all ranks together, where each has a part and 0 elsewhere.

    Args:
        parts: any shape and dtype, the same on every rank; unchanged.
        group: the ranks that split the tokens; None where nobody does.
    Returns:
        The sum, the same on every rank.
    Collectives: one all-reduce, none backward. Gradient: as it comes, since every rank of the group computes the same
        loss on the whole. So each parameter's gradient is in parts too, which are to be summed over the group.
    """
    if group is None:
        return parts
    summed: torch.Tensor = _SumOverGroup.apply(parts, group)  # type: ignore[no-untyped-call]
    return summed


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        del ctx
        summed = parts.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return gradients[0], None
