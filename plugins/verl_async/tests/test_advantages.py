"""GRPO advantages."""

from __future__ import annotations

import math

import pytest
import torch

from verl_async.algorithms.advantages import grpo_advantages, uniform_groups


def test_hand_worked_example() -> None:
    # Group 1: mean 1/4; centred 3/4, -1/4, -1/4, -1/4; unbiased variance (9/16 + 3/16) / 3 = 1/4, std 1/2.
    # Group 2: mean 1; centred -1, 1, -1, 1; unbiased variance 4/3.
    rewards = torch.tensor([[1.0, 0, 0, 0], [0, 2, 0, 2]])
    root = math.sqrt(3) / 2
    torch.testing.assert_close(
        grpo_advantages(rewards, normalize_by_std=True),
        torch.tensor([[1.5, -0.5, -0.5, -0.5], [-root, root, -root, root]]),
        rtol=1e-5,
        atol=0,
    )
    assert grpo_advantages(rewards, normalize_by_std=False).tolist() == [[0.75, -0.25, -0.25, -0.25], [-1, 1, -1, 1]]


@pytest.mark.parametrize("normalize_by_std", [True, False])
def test_equal_rewards_give_exactly_zero(normalize_by_std: bool) -> None:
    # 0.1 has no exact binary form: the mean of seven is not 0.1, and that difference over a tiny std would be noise.
    rewards = torch.full((3, 7), 0.1)
    rewards[1] = torch.arange(7)
    advantages = grpo_advantages(rewards, normalize_by_std=normalize_by_std)
    assert uniform_groups(rewards).tolist() == [True, False, True]
    assert advantages[0].tolist() == advantages[2].tolist() == [0.0] * 7
    assert advantages[1].abs().sum() > 1


def test_advantages_carry_no_gradient() -> None:
    rewards = torch.tensor([[1.0, 0.0]], requires_grad=True)
    assert not grpo_advantages(rewards, normalize_by_std=True).requires_grad


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 2, 2)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected .groups, samples. with 2 samples or more"):
        grpo_advantages(torch.zeros(shape), normalize_by_std=True)
