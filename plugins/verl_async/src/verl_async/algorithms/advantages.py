"""How much better each sample did than the others of its group.

Shape legend: N groups (prompts), G samples of a group, R tokens of a response.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation; verl's value."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleGroup:
    """The scored samples of one prompt."""

    rewards: Tensor
    """[G] float64; lowered by the KL to the reference policy where ``algorithm.kl.where`` is ``reward``."""
    columns: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """Per-token numbers that the advantage asks for (see `verl_async.algorithms.columns`): of each sample [R] float64,
    for the tokens of its response that are in the loss. ``reward/KEY`` is the same number for each."""


class Advantage(Protocol):
    """Called with one group after the other, in the job's own process."""

    def __call__(self, group: SampleGroup) -> Tensor | Sequence[Tensor]:
        """Return [G], which holds for all tokens of a response; or for each sample [R], one for each token.

        Finite; no gradient flows.
        """


def grpo(group: SampleGroup) -> Tensor:
    """Group-relative advantages, divided by the standard deviation; see `grpo_advantages`."""
    return grpo_advantages(group.rewards[None], normalize_by_std=True)[0]


def dr_grpo(group: SampleGroup) -> Tensor:
    """Group-relative advantages, not divided; see `grpo_advantages`."""
    return grpo_advantages(group.rewards[None], normalize_by_std=False)[0]


def uniform_groups(rewards_NG: Tensor) -> Tensor:
    """Tell which groups have nothing to learn from, since all their rewards are equal.

    Args:
        rewards_NG: [N, G], any dtype.
    Returns:
        [N] bool.
    """
    return (rewards_NG == rewards_NG[:, :1]).all(dim=1)


def grpo_advantages(rewards_NG: Tensor, *, normalize_by_std: bool) -> Tensor:
    """Centre each group's rewards and, for GRPO, divide them by the group's standard deviation.

    Args:
        rewards_NG: [N, G], any float dtype; G >= 2. The squares of their differences must be in its range.
        normalize_by_std: True for GRPO: divide by (std + 1e-6), with the unbiased std (divisor G - 1), as verl does.
            False for Dr. GRPO, which leaves it out since it favours prompts that are nearly solved or nearly hopeless.
    Returns:
        [N, G], of the rewards' dtype; exactly 0 in groups of equal rewards, where rounding would leave noise.
    Raises:
        ValueError: not [N, G] with G >= 2.
    Collectives: none. Gradient: none flows.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.2; without std: Liu et al. 2025 (Dr. GRPO), section 3.2.
    """
    if rewards_NG.dim() != 2 or rewards_NG.shape[1] < 2:  # noqa: PLR2004
        raise ValueError(
            f"rewards have shape {tuple(rewards_NG.shape)}; expected [groups, samples] with 2 samples or more"
        )
    rewards_NG = rewards_NG.detach()
    advantages_NG = rewards_NG - rewards_NG.mean(dim=1, keepdim=True)
    if normalize_by_std:
        advantages_NG = advantages_NG / (rewards_NG.std(dim=1, keepdim=True, unbiased=True) + STD_EPSILON)
    return advantages_NG.masked_fill(uniform_groups(rewards_NG)[:, None], 0.0)
