"""How much better each sample did than the others of its group.

Shape legend: N groups (prompts), G samples of a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the standard deviation; verl's value."""


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
    return torch.where(uniform_groups(rewards_NG)[:, None], 0.0, advantages_NG)
