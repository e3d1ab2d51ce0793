"""Splitting the tokens of a micro-batch over ranks (Ulysses), and bringing what they computed together.

Shape legend: T tokens of a micro-batch, t those of this rank, m loss tokens that this rank predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from verl_engine.batch.packed import PackedBatch


@dataclass(frozen=True, slots=True)
class TokenSlice:
    """What one rank runs of a packed micro-batch."""

    input_ids: torch.Tensor
    """[t] int64."""
    position_ids: torch.Tensor
    """[t] int64; begins anew with each sequence."""
    predictors: torch.Tensor
    """[m] int64: places among the t of the tokens that predict a loss token, each its next."""
    loss_positions: torch.Tensor
    """[m] int64: places among the T of the tokens that they predict."""


def slice_tokens(batch: PackedBatch, group: dist.ProcessGroup | None) -> TokenSlice:
    """Cut out this rank's tokens; all of them where there is no group."""
    assert group is None
    return TokenSlice(batch.input_ids, batch.position_ids, batch.loss_positions - 1, batch.loss_positions)
