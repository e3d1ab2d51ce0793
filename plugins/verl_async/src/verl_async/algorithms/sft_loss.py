"""Supervised loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput


def sft_loss(output: TokenOutput, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum the negative log-likelihood, in nats, over the tokens in the loss; a `LossFn`.

    Returns:
        Scalar float32, and no metrics.
    Collectives: none. Gradient: through ``output.log_probs``.
    """
    return -output.log_probs[batch.loss_positions].sum(), {}
