"""Clipped policy-gradient loss (PPO), with separate clips and an importance correction for stale samples.

Shape legend: T tokens of the micro-batch, K of them in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput

MAX_LOG_RATIO = 20.0
"""Log-ratios are held within +-20 (verl's bound). Far beyond, exp overflows float32, and a clipped token's gradient
becomes 0 * inf = nan."""


def clipped_policy_loss(
    log_probs_K: Tensor, old_log_probs_K: Tensor, advantages_K: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute each token's clipped loss: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A).

    Args:
        log_probs_K: [K] float32, nats; current policy.
        old_log_probs_K: [K] float32, nats; the policy that the ratio is taken against.
        advantages_K: [K] float32.
        clip_low: below 1; bounds the ratio from below at 1 - clip_low.
        clip_high: bounds the ratio from above at 1 + clip_high.
    Returns:
        [K] float32 losses, and metrics by name, each [K] float32: ``ratio``; ``clip_fraction``, 1 where the clipped
        term is the smaller one; ``approx_kl``, nats, the estimate (ratio - 1) - log(ratio) of KL(old || current).
    Collectives: none. Gradient: through log_probs_K only.
    Source: Schulman et al. 2017 (PPO), eq. 7; separate clips: Yu et al. 2025 (DAPO), section 3.1; k3:
        Schulman 2020, "Approximating KL divergence".
    """
    log_ratio_K = (log_probs_K - old_log_probs_K.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_K = log_ratio_K.exp()
    gain_K = ratio_K * advantages_K.detach()
    clipped_gain_K = ratio_K.clamp(1 - clip_low, 1 + clip_high) * advantages_K.detach()
    metrics = {
        "ratio": ratio_K,
        "clip_fraction": (clipped_gain_K < gain_K).float(),
        "approx_kl": ratio_K - 1 - log_ratio_K,
    }
    return -torch.minimum(gain_K, clipped_gain_K), {name: value.detach() for name, value in metrics.items()}


def truncated_importance_weight(old_log_probs_K: Tensor, rollout_log_probs_K: Tensor, cap: float) -> Tensor:
    """Weight of each token for having been drawn by other weights than the old policy: min(exp(old - rollout), cap).

    Args:
        old_log_probs_K: [K] float32, nats; the policy that the ratio is taken against.
        rollout_log_probs_K: [K] float32, nats; the policy that drew the token.
        cap: bounds the weight from above, and with it the variance, at the price of some bias.
    Returns:
        [K] float32.
    Collectives: none. Gradient: none flows.
    Source: Ionides 2008, "Truncated importance sampling"; in PPO, with the ratio decoupled from the policy that drew
        the samples: Hilton et al. 2021, "Batch size-invariance for policy optimization" (Decoupled PPO).
    """
    return (old_log_probs_K - rollout_log_probs_K).detach().exp().clamp(max=cap)


@dataclass(frozen=True, slots=True)
class ClippedPolicyLoss:
    """The policy loss as a `LossFn`: sums over the tokens in the loss; all other tokens add exactly 0, junk or not.

    Fields it reads: ``advantages`` and ``rollout_log_probs``; with an importance cap also ``old_log_probs``.
    """

    clip_low: float
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float
    """The ratio is clipped above at 1 + clip_high."""
    importance_cap: float | None = None
    """None: the ratio is taken against the rollout's log-probs. A number: against ``old_log_probs``, and each token's
    loss is multiplied by its truncated importance weight."""

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the summed loss and summed metrics of one micro-batch.

        Returns:
            Scalar float32 loss; and ``ratio``, ``clip_fraction``, ``approx_kl`` and, with a cap, ``importance_weight``:
            scalar float32 sums without gradient.
        """
        log_probs_K = output.log_probs[batch.loss_positions]
        advantages_K = _pick(batch, "advantages", log_probs_K)
        rollout_K = _pick(batch, "rollout_log_probs", log_probs_K)
        old_K = rollout_K if self.importance_cap is None else _pick(batch, "old_log_probs", log_probs_K)
        loss_K, metrics = clipped_policy_loss(log_probs_K, old_K, advantages_K, self.clip_low, self.clip_high)
        if self.importance_cap is not None:
            weight_K = truncated_importance_weight(old_K, rollout_K, self.importance_cap)
            loss_K = loss_K * weight_K
            metrics["importance_weight"] = weight_K
        return loss_K.sum(), {name: value.sum() for name, value in metrics.items()}


def _pick(batch: PackedBatch, name: str, like_K: Tensor) -> Tensor:
    # Picked, not multiplied by the mask: what lies outside the loss may be nan. A micro-batch without sequences, which
    # only keeps the ranks in step, has no fields.
    return batch.fields[name][batch.loss_positions] if len(like_K) else torch.zeros_like(like_K)
