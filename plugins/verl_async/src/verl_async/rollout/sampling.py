"""Drawing tokens from logits: pure functions, every row of a batch with settings of its own.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.rollout.interface import SamplingParams

_WEIGHT_SCALE: Final = 2.0**60
"""Probabilities become integers of this unit: exact for a float32 down to 2**-36, and their sum stays below 2**63."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling settings of each row as tensors, and what they make needless."""

    temperature: torch.Tensor
    """[B] float32; 1 where the row is greedy, whose log-probabilities are those of softmax(logits)."""
    greedy: torch.Tensor
    """[B] bool."""
    top_k: torch.Tensor
    """[B] int64; the vocabulary's size or more keeps all."""
    top_p: torch.Tensor
    """[B] float64; infinity keeps all."""
    any_temperature: bool
    any_greedy: bool
    any_filter: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], device: torch.device) -> RowSampling:
        """Gather the settings of a batch."""
        greedy = [p.temperature == 0 for p in params]
        temperature = [p.temperature or 1.0 for p in params]
        top_k = [p.top_k or torch.iinfo(torch.int64).max for p in params]
        top_p = [p.top_p if p.top_p < 1 else torch.inf for p in params]
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device),
            greedy=torch.tensor(greedy, device=device),
            top_k=torch.tensor(top_k, device=device),
            top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
            any_temperature=any(t != 1 for t in temperature),
            any_greedy=any(greedy),
            any_filter=any(p.top_k > 0 or p.top_p < 1 for p in params),
        )

    def select(self, rows: torch.Tensor) -> RowSampling:
        """Keep these rows only."""
        return RowSampling(
            temperature=self.temperature[rows],
            greedy=self.greedy[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            any_temperature=self.any_temperature,
            any_greedy=self.any_greedy,
            any_filter=self.any_filter,
        )


def draw_tokens(
    logits_BV: torch.Tensor, sampling: RowSampling, uniform_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the next token of each row.

    Args:
        logits_BV: [B, V], any float dtype.
        sampling: The rows' settings.
        uniform_B: [B] float64 in [0, 1): what decides each draw; greedy rows ignore it.
    Returns:
        token [B] int64, and its log-probability [B] float32 in nats under the full softmax(logits / temperature),
        before top-k and top-p.
    """
    scores_BV = logits_BV.float()
    if sampling.any_temperature:
        scores_BV = scores_BV / sampling.temperature[:, None]
    log_probs_BV = scores_BV.log_softmax(-1)
    probs_BV = log_probs_BV.exp()
    if sampling.any_filter:
        probs_BV = filter_probs(probs_BV, sampling.top_k, sampling.top_p)
    token_B = draw_inverse_cdf(probs_BV, uniform_B)
    if sampling.any_greedy:
        token_B = torch.where(sampling.greedy, logits_BV.argmax(-1), token_B)
    return token_B, log_probs_BV.gather(1, token_B[:, None])[:, 0]


def filter_probs(probs_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor) -> torch.Tensor:
    """Set the probabilities outside top-k, then outside top-p of what top-k left, to zero.

    Exactly min(k, V) tokens survive top-k: of equal probabilities the lower token ids. Top-p keeps the smallest set of
    likeliest tokens whose share of the probability left by top-k reaches p, so at least one.

    Args:
        probs_BV: [B, V] float32, at least zero.
        top_k_B: [B] int64, at least 1.
        top_p_B: [B] float64, above zero.
    Returns:
        [B, V] float32, not renormalised.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_BV.shape[-1], device=probs_BV.device)
    sorted_BV = sorted_BV.masked_fill(rank_V >= top_k_B[:, None], 0.0)
    up_to_BV = sorted_BV.cumsum(-1, dtype=torch.float64)
    before_BV = up_to_BV - sorted_BV
    sorted_BV = sorted_BV.masked_fill(before_BV >= top_p_B[:, None] * up_to_BV[:, -1:], 0.0)
    return torch.zeros_like(probs_BV).scatter_(-1, order_BV, sorted_BV)


def draw_inverse_cdf(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Take the first token at which the cumulated probability exceeds uniform * total.

    Sums are of integers, thus exact in any order: a parallel prefix sum on an accelerator gives what a loop gives, and
    a token of probability zero cannot be drawn, which rounded sums do not promise.

    Args:
        probs_BV: [B, V] float32, at least zero, sum of a row within (0, 8).
        uniform_B: [B] float64 in [0, 1).
    Returns:
        [B] int64; for a row that is not finite some valid token.
    """
    cumulated_BV = (probs_BV * _WEIGHT_SCALE).long().cumsum(-1)
    total_B = cumulated_BV[:, -1]
    target_B = torch.minimum((uniform_B * total_B.double()).long(), total_B - 1)
    token_B1 = torch.searchsorted(cumulated_BV, target_B[:, None], right=True)
    return token_B1[:, 0].clamp_(max=probs_BV.shape[-1] - 1)
