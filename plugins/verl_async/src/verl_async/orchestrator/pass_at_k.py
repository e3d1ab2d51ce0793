"""How often a prompt is solved: mean@k and pass@k."""

from __future__ import annotations

from math import comb
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_async.orchestrator.samples import ScoredGroup


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of k responses is correct: 1 - C(n - c, k) / C(n, k).

    Args:
        num_samples: n responses to one prompt, at least k.
        num_correct: c, how many of them are correct.
        k: how many tries.
    Source: Chen et al. 2021, Evaluating Large Language Models Trained on Code, equation 1.
    """
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def solved(group: ScoredGroup, num_samples: int, correct_reward: float | None) -> Iterator[tuple[str, float]]:
    """Yield ``mean@k`` of one prompt for k = `num_samples`, and ``pass@k`` for it and the powers of two from 2 on.

    Args:
        group: responses that could be scored; those k that are more than they are have no pass@k.
        num_samples: that were asked for.
        correct_reward: see `EvaluationSetConfig`.
    """
    correct = group.exact if correct_reward is None else tuple(reward >= correct_reward for reward in group.rewards)
    if not correct:
        return
    yield f"mean@{num_samples}", sum(correct) / len(correct)
    for k in sorted({num_samples, *(2**power for power in range(num_samples.bit_length()))} - {1}):
        if k <= len(correct):
            yield f"pass@{k}", pass_at_k(len(correct), sum(correct), k)
