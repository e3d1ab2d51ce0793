"""Estimates of the KL divergence from a reference policy, token by token.

Shape legend: K tokens in the loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from verl_async.algorithms.policy_loss import MAX_LOG_RATIO
from verl_engine.contract.choices import require_choice

if TYPE_CHECKING:
    from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
DEFAULT: Final[KlEstimator] = "k3"


def kl_estimate(log_probs_K: Tensor, ref_log_probs_K: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) from tokens that the policy drew.

    With log r = reference - policy:
    - k1: -log r. Unbiased, of high variance. As a term of a loss it does nothing on average, for the expectation of its
      gradient is 0: it belongs into the reward.
    - k2: (log r)^2 / 2. Biased, of low variance; the expectation of its gradient is that of the KL.
    - k3: (r - 1) - log r. Unbiased, of low variance, never negative; its gradient is that of KL(reference || policy).

    Args:
        log_probs_K: [K], nats; the policy.
        ref_log_probs_K: [K], nats; the reference.
        estimator: which.
    Returns:
        [K], nats. Log r is held within +-20, as ratios are.
    Raises:
        ConfigError: there is no such estimator.
    Collectives: none. Gradient: through log_probs_K only.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    require_choice("estimator", estimator, KlEstimator)
    log_ratio_K = (ref_log_probs_K.detach() - log_probs_K).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k1":
        return -log_ratio_K
    if estimator == "k2":
        return log_ratio_K.square() / 2
    return log_ratio_K.exp() - 1 - log_ratio_K
