"""From logits to the log-probs of a micro-batch's tokens, once for all engines.

Shape legend: T tokens of a micro-batch, M loss tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from verl_engine.batch.packed import PackedBatch


def token_log_probs(logits_MV: torch.Tensor, batch: PackedBatch, temperature: float) -> torch.Tensor:
    """Compute the log-prob of each loss token under softmax(logits / temperature).

    Args:
        logits_MV: [M, V], any float dtype: those that predict the loss tokens, so row m comes from the token at index
            ``batch.loss_positions[m] - 1``.
        batch: the micro-batch.
        temperature: above 0.
    Returns:
        [T] float32, nats; 0 outside the loss.
    Collectives: none. Gradient: through the logits.
    """
    targets_M = batch.input_ids[batch.loss_positions]
    logp_M = (logits_MV.float() / temperature).log_softmax(-1).gather(-1, targets_M[:, None])[:, 0]
    zeros_T = torch.zeros(batch.num_tokens, device=logp_M.device)
    return zeros_T.index_put((batch.loss_positions,), logp_M)
