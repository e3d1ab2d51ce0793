"""The clipped policy loss and the supervised loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from verl_async.algorithms.policy_loss import PpoLoss, PpoLossConfig, clipped_policy_loss, truncated_importance_weight
from verl_async.algorithms.sft_loss import sft_loss
from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.engine.base import TokenOutput

if TYPE_CHECKING:
    from verl_engine.engine.metrics import Metric

NAN = float("nan")


def batch_of(mask: list[bool], **fields: list[float]) -> PackedBatch:
    arrays = {name: np.array(values, np.float32) for name, values in fields.items()}
    return PackedBatch.from_sequences([Sequence(np.arange(len(mask)), np.array(mask), arrays)])


def ppo(
    log_probs: torch.Tensor, batch: PackedBatch, **settings: float | None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    return PpoLoss(PpoLossConfig.model_validate(settings))(TokenOutput(log_probs), batch)


def logs(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_hand_worked_example_clips_on_both_sides() -> None:
    # Ratios 1.5 and 0.5, each with A = 2 and A = -2; clip to [0.8, 1.28].
    #   1.5,  2: min( 3.0,  2.56) =  2.56: clipped from above, no gradient
    #   1.5, -2: min(-3.0, -2.56) = -3.0:  not clipped, gradient of the loss = -ratio * A = 3
    #   0.5,  2: min( 1.0,  1.6)  =  1.0:  not clipped, gradient -1
    #   0.5, -2: min(-1.0, -1.6)  = -1.6:  clipped from below, no gradient
    log_probs = torch.tensor(logs(0.6, 0.6, 0.2, 0.2), requires_grad=True)
    old = torch.tensor(logs(0.4, 0.4, 0.4, 0.4))
    losses, metrics = clipped_policy_loss(log_probs, old, torch.tensor([2.0, -2, 2, -2]), 0.2, 0.28)
    torch.testing.assert_close(losses, torch.tensor([-2.56, 3.0, -1.0, 1.6]))
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 3, -1, 0]))
    torch.testing.assert_close(metrics["ratio"], torch.tensor([1.5, 1.5, 0.5, 0.5]))
    assert metrics["clip_fraction"].tolist() == [1, 0, 0, 1]
    # (ratio - 1) - log(ratio): 0.5 - 0.405465 and -0.5 + 0.693147.
    torch.testing.assert_close(metrics["approx_kl"], torch.tensor([0.094535, 0.094535, 0.193147, 0.193147]))
    assert not any(value.requires_grad for value in metrics.values())


def test_on_policy_it_is_the_plain_policy_gradient() -> None:
    log_probs = torch.tensor(logs(0.3, 0.9), requires_grad=True)
    losses, metrics = clipped_policy_loss(log_probs, log_probs, torch.tensor([2.0, -1.0]), 0.2, 0.28)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    assert gradient.tolist() == [-2.0, 1.0]
    assert metrics["clip_fraction"].tolist() == [0, 0]
    assert metrics["approx_kl"].tolist() == [0, 0]


def test_ratios_without_bound_stay_finite() -> None:
    log_probs = torch.tensor([0.0, 0.0, -200.0], requires_grad=True)
    losses, _ = clipped_policy_loss(log_probs, torch.tensor([-200.0, -200, 0]), torch.tensor([1.0, 0, -1]), 0.2, 0.28)
    (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
    torch.testing.assert_close(losses, torch.tensor([-1.28, 0.0, 0.8]))
    assert gradient.tolist() == [0, 0, 0]


def test_importance_weight_is_truncated_and_has_no_gradient() -> None:
    old = torch.tensor(logs(0.2, 0.6, 0.9), requires_grad=True)
    weight = truncated_importance_weight(old, torch.tensor(logs(0.4, 0.4, 0.1)), cap=2.0)
    torch.testing.assert_close(weight, torch.tensor([0.5, 1.5, 2.0]))
    assert not weight.requires_grad
    assert truncated_importance_weight(torch.zeros(1), torch.tensor([-500.0]), cap=2.0).item() == 2.0


def test_loss_sums_over_the_loss_tokens_only() -> None:
    batch = batch_of(
        [False, True, False, True],
        advantages=[NAN, 2, NAN, -2],
        old_log_probs=[NAN, math.log(0.4), float("-inf"), math.log(0.4)],
    )
    log_probs = torch.tensor([0.0, *logs(0.6), 0.0, *logs(0.6)], requires_grad=True)
    loss, metrics = ppo(log_probs, batch, importance_cap=None)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(-2.56 + 3.0))
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, 0, 0, 3]))
    assert set(metrics) == {"ratio", "clip_fraction", "approx_kl"}
    assert {(metric.reduction, metric.count) for metric in metrics.values()} == {("mean", 2)}
    assert metrics["clip_fraction"].value.item() == 1
    torch.testing.assert_close(metrics["ratio"].value, torch.tensor(3.0))


def test_with_a_cap_the_ratio_is_against_the_old_policy() -> None:
    # Token 1: ratio 0.6/0.6 = 1, weight 0.6/0.4 = 1.5; token 2: ratio 1.1, weight 0.9/0.1 capped at 2.
    batch = batch_of(
        [False, True, True],
        advantages=[NAN, 2, -1],
        rollout_log_probs=[NAN, *logs(0.4, 0.1)],
        old_log_probs=[NAN, *logs(0.6, 0.9)],
    )
    log_probs = torch.tensor([0.0, *logs(0.6, 0.99)], requires_grad=True)
    loss, metrics = ppo(log_probs, batch)
    loss.backward()
    torch.testing.assert_close(loss, torch.tensor(1.5 * -2 + 2 * 1.1))
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, torch.tensor([0.0, -3.0, 2.2]))
    torch.testing.assert_close(metrics["importance_weight"].value, torch.tensor(3.5))
    torch.testing.assert_close(metrics["ratio"].value, torch.tensor(2.1))


def test_sft_loss_sums_over_the_loss_tokens_only() -> None:
    log_probs = torch.tensor([0.0, -1.5, 0.0, -2.0], requires_grad=True)
    loss, metrics = sft_loss(TokenOutput(log_probs), batch_of([False, True, False, True]))
    loss.backward()
    assert loss.item() == 3.5
    assert metrics == {}
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0, -1, 0, -1]
