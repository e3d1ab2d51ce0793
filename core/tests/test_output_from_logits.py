from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.output_from_logits import numbers_from_logits, output_from_logits


def batch() -> PackedBatch:
    """Tokens 0 1 0 and 1 1, of a vocabulary of two; in the loss are token 1 and 2 of the first, token 1 of the second.

    Sequences lie sorted by length: 1 1 | 0 1 0, with loss at 1, 3 and 4.
    """
    return PackedBatch.from_sequences(
        [
            Sequence(np.array([0, 1, 0]), np.array([False, True, True])),
            Sequence(np.array([1, 1]), np.array([False, True])),
        ]
    )


def test_a_worked_example() -> None:
    # Rows predict tokens 1, 1, 0. softmax(0, ln 3) is 1/4, 3/4.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0], [0.0, math.log(3)]])
    found = output_from_logits(logits, batch(), temperature=1.0).log_probs
    expected = [0.0, math.log(3 / 4), 0.0, math.log(1 / 2), math.log(1 / 4)]
    assert found.tolist() == pytest.approx(expected)


def test_the_temperature_divides_the_logits() -> None:
    # At temperature 2 the odds of 9 to 1 become 3 to 1.
    logits = torch.tensor([[0.0, math.log(9)]] * 3)
    found = output_from_logits(logits, batch(), temperature=2.0).log_probs
    assert found.tolist() == pytest.approx([0.0, math.log(3 / 4), 0.0, math.log(3 / 4), math.log(1 / 4)])


def test_each_token_has_the_temperature_of_its_own_place() -> None:
    # Of tokens 1, 3 and 4, which are in the loss; softmax(0, ln 9) has odds of 9 to 1, 3 to 1, and 81 to 1.
    logits = torch.tensor([[0.0, math.log(9)]] * 3)
    found = output_from_logits(logits, batch(), temperature=torch.tensor([9.0, 1.0, 9.0, 2.0, 0.5])).log_probs
    assert found.tolist() == pytest.approx([0.0, math.log(9 / 10), 0.0, math.log(3 / 4), math.log(1 / 82)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_is_float32_and_the_gradient_reaches_the_logits(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    found = output_from_logits(logits, batch(), temperature=1.0).log_probs
    assert found.dtype == torch.float32
    found.sum().backward()
    # d log softmax of the target: 1 - p for it, -p for the other.
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-0.5, 0.5], [-0.5, 0.5], [0.5, -0.5]]


def test_a_batch_without_loss_has_zeros_and_a_gradient_of_zero() -> None:
    empty = PackedBatch.from_sequences([])
    logits = torch.zeros(1, 2, requires_grad=True)
    found = output_from_logits(logits[empty.loss_positions - 1], empty, temperature=1.0).log_probs
    assert found.tolist() == [0.0]
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 0.0]]


def test_a_worked_example_of_entropy() -> None:
    # 1/4 and 3/4: ln 4 - 3/4 ln 3. One half each: ln 2.
    logits = torch.tensor([[0.0, math.log(3)], [0.0, 0.0], [0.0, math.log(3)]])
    found = output_from_logits(logits, batch(), temperature=1.0, entropy="value").entropy
    uneven = math.log(4) - 0.75 * math.log(3)
    assert found.tolist() == pytest.approx([0.0, uneven, 0.0, math.log(2), uneven])


def test_entropy_that_was_not_asked_for_is_an_error() -> None:
    found = output_from_logits(torch.zeros(3, 2), batch(), temperature=1.0)
    with pytest.raises(UnsupportedError, match=r"set engine\.entropy=value"):
        found.entropy  # noqa: B018 - asking for it is the test


def test_entropy_has_a_gradient_only_where_it_is_asked_for() -> None:
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    _, value = numbers_from_logits(logits, torch.tensor([1]), 1.0, "value")
    assert value is not None
    assert not value.requires_grad
    _, entropy = numbers_from_logits(logits, torch.tensor([1]), 1.0, "gradient")
    assert entropy is not None
    entropy.sum().backward()
    # dH / dz_v = -p_v (log p_v + H), the same on both sides of the mean.
    expected = -0.75 * (math.log(0.75) + float(entropy.detach()))
    assert logits.grad is not None
    assert logits.grad.tolist() == [pytest.approx([-expected, expected], rel=1e-5)]
