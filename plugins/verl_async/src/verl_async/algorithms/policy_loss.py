"""Clipped policy-gradient loss (PPO), with separate clips and an importance correction for stale samples.

Shape legend: T tokens of the micro-batch, K of them in the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from verl_async.algorithms.columns import ADVANTAGES, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS
from verl_engine.contract.bounded import Positive
from verl_engine.contract.strict_model import StrictModel

if TYPE_CHECKING:
    from torch import Tensor

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput
    from verl_engine.engine.metrics import Metric

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
    return -gain_K.minimum(clipped_gain_K), {name: value.detach() for name, value in metrics.items()}


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


class PpoLossConfig(StrictModel):
    """The clipped policy loss, with a correction for samples that were drawn by other weights."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low (PPO)."""
    clip_high: Positive = 0.28
    """The ratio is clipped above at 1 + clip_high (DAPO's clip-higher)."""
    importance_cap: Annotated[float, Field(ge=1, le=1e37)] | None = 2.0
    """Upper bound of the importance weight exp(old - rollout log-prob) that each token's loss is multiplied by; null
    leaves the weight out. It is 1 with ``old_log_probs: rollout``, where both are the same."""


class PpoLoss:
    """The clipped policy loss as a `LossFn`: sums over the tokens in the loss; the others add exactly 0, junk or not.

    The ratio is taken against the old log-probs; see `clipped_policy_loss` and `truncated_importance_weight`.
    """

    Config = PpoLossConfig
    columns = (ADVANTAGES, OLD_LOG_PROBS, ROLLOUT_LOG_PROBS)

    def __init__(self, config: PpoLossConfig) -> None:
        """Keep the settings."""
        self.config = config

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[Tensor, dict[str, Metric]]:
        """Compute the summed loss and the metrics of one micro-batch.

        Returns:
            Scalar float32 loss; and ``ratio``, ``clip_fraction``, ``approx_kl`` and, with a cap, ``importance_weight``:
            means over the tokens in the loss, without gradient.
        """
        from verl_engine.engine.metrics import Metric  # brings torch, which validating a job does without

        at, config = batch.loss_positions, self.config
        # Picked, not multiplied by the mask: what lies outside the loss may be nan.
        old_K, advantages_K = batch.fields[OLD_LOG_PROBS][at], batch.fields[ADVANTAGES][at]
        loss_K, metrics = clipped_policy_loss(
            output.log_probs[at], old_K, advantages_K, config.clip_low, config.clip_high
        )
        if config.importance_cap is not None:
            weight_K = truncated_importance_weight(old_K, batch.fields[ROLLOUT_LOG_PROBS][at], config.importance_cap)
            loss_K = loss_K * weight_K
            metrics["importance_weight"] = weight_K
        return loss_K.sum(), {name: Metric(value.sum(), "mean", len(at)) for name, value in metrics.items()}
