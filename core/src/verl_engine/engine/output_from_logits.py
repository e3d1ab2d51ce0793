"""From logits to what is said of a micro-batch's tokens, for engines that hold all logits at once.

`verl_engine.engine.linear_log_probs` computes the same without ever holding them.

Shape legend: T tokens of a micro-batch, M loss tokens, V vocabulary, N targets of each.
"""

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.choices import require_choice
from verl_engine.engine.linear_log_probs import Entropy
from verl_engine.engine.temperature import Temperature, column, rows_of
from verl_engine.engine.token_output import TokenOutput, columns_of, numbers_of
from verl_engine.engine.top_k import fill_top_ids, scored_ids


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
        Log-probs, and entropy and those of top-k ids if they are asked for.
    Raises:
        ConfigError: `entropy` is none of these.
    Collectives: none. Gradient: through the logits.
    """
    positions_M = batch.loss_positions
    ids_MN = scored_ids(batch, positions_M)
    found = numbers_from_logits(logits_MV, ids_MN, rows_of(temperature, positions_M), entropy, batch.top_k)
    numbers_MF = numbers_of(*found, ids_MN, batch.top_k)
    zeros_TF = numbers_MF.new_zeros(batch.num_tokens, numbers_MF.shape[1])
    return TokenOutput.of(zeros_TF.index_put((positions_M,), numbers_MF), columns_of(batch, entropy))


def numbers_from_logits(
    logits_MV: torch.Tensor, targets: torch.Tensor, temperature: Temperature, entropy: Entropy = "off", top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute log-probs and entropy of each row under softmax(logits / temperature), as `output_from_logits` does.

    Of [M, V] logits and targets [M] or [M, N]; the temperature is a number, or [M]. `top_k` of the last targets are
    found here, and written into `targets`; see `fill_top_ids`.
    Returns:
        Log-probs in the shape of the targets and entropy [M] (None where it is off), float32, nats.
    """
    require_choice("entropy", entropy, Entropy)
    fill_top_ids(targets, logits_MV, top_k)
    logp_MV = (logits_MV.float() / column(temperature)).log_softmax(-1)
    logp = logp_MV.gather(-1, targets if targets.ndim > 1 else targets[:, None]).view_as(targets)
    if entropy == "off":
        return logp, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "gradient"):
        entropy_M = -(logp_MV.exp() * logp_MV).sum(-1)
    return logp, entropy_M
