"""From logits to what is said of a micro-batch's tokens, for engines that hold all logits at once.

`verl_engine.engine.linear_log_probs` computes the same without ever holding them.

Shape legend: T tokens of a micro-batch, M loss tokens, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from verl_engine.contract.choices import require_choice
from verl_engine.engine.linear_log_probs import Entropy
from verl_engine.engine.temperature import column, rows_of
from verl_engine.engine.token_output import TokenOutput

if TYPE_CHECKING:
    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.temperature import Temperature


def output_from_logits(
    logits_MV: torch.Tensor, batch: PackedBatch, temperature: Temperature, entropy: Entropy = "off"
) -> TokenOutput:
    """Say of each loss token what softmax(logits / temperature) says.

    Args:
        logits_MV: [M, V], any float dtype: those that predict the loss tokens, so row m comes from the token at index
            ``batch.loss_positions[m] - 1``.
        batch: the micro-batch.
        temperature: above 0; a number, or [T].
        entropy: the config's field of this name: ``off``, ``value`` (no gradient) or ``gradient``.
    Returns:
        Log-probs, and entropy if it is asked for.
    Raises:
        ConfigError: `entropy` is none of these.
    Collectives: none. Gradient: through the logits.
    """
    positions_M = batch.loss_positions
    logp_M, entropy_M = numbers_from_logits(
        logits_MV, batch.input_ids[positions_M], rows_of(temperature, positions_M), entropy
    )
    zeros_T = logp_M.new_zeros(batch.num_tokens)
    return TokenOutput(
        given_log_probs=zeros_T.index_put((positions_M,), logp_M),
        given_entropy=None if entropy_M is None else zeros_T.index_put((positions_M,), entropy_M),
    )


def numbers_from_logits(
    logits_MV: torch.Tensor, targets_M: torch.Tensor, temperature: Temperature, entropy: Entropy = "off"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-prob and entropy of each row under softmax(logits / temperature).

    Args:
        logits_MV: [M, V], any float dtype.
        targets_M: [M] int64: whose log-probs.
        temperature: above 0; a number, or [M].
        entropy: ``off``, ``value`` (no gradient) or ``gradient``.
    Returns:
        Log-probs [M] and entropy [M] (None where it is off), float32, nats.
    Raises:
        ConfigError: `entropy` is none of these.
    Collectives: none. Gradient: through the logits.
    """
    require_choice("entropy", entropy, Entropy)
    logp_MV = (logits_MV.float() / column(temperature)).log_softmax(-1)
    logp_M = logp_MV.gather(-1, targets_M[:, None])[:, 0]
    if entropy == "off":
        return logp_M, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
    return logp_M, entropy_M
