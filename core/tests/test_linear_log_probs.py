"""Log-probs from hidden states equal those from logits, and so do their gradients; the logits never exist."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch

from core.tests.largest_tensor import LargestTensor
from verl_engine.engine.linear_log_probs import Entropy, linear_log_probs
from verl_engine.engine.output_from_logits import numbers_from_logits

if TYPE_CHECKING:
    from verl_engine.engine.temperature import Temperature

VOCABULARY, HIDDEN = 70, 3
ENTROPIES = get_args(Entropy)
both = pytest.mark.parametrize("has_bias", [False, True], ids=["no_bias", "bias"])
any_entropy = pytest.mark.parametrize("entropy", ENTROPIES)


def inputs(num: int, dtype: torch.dtype = torch.float32, *, has_bias: bool = False) -> list[Any]:
    """Hidden states, weight and bias, all with gradient."""
    generator = torch.Generator().manual_seed(num)
    made: list[Any] = [
        (torch.randn(shape, generator=generator, dtype=torch.float64) / 2).to(dtype).requires_grad_()
        for shape in ((num, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))
    ]
    return made if has_bias else [*made[:2], None]


def targets(num: int) -> torch.Tensor:
    """The first and the last of the vocabulary, and some between."""
    return torch.arange(num) * (VOCABULARY - 1) // max(num - 1, 1)


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, temperature: Temperature, entropy: Entropy
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return numbers_from_logits(logits, targets(len(hidden)), temperature, entropy)


def gradients(numbers: tuple[torch.Tensor, torch.Tensor | None], leaves: list[Any]) -> list[torch.Tensor]:
    """Gradient of a sum with another factor for each number of each token."""
    total = torch.zeros(())
    for index, number in enumerate(numbers):
        if number is not None and number.requires_grad:
            total = total + (number * torch.linspace(-1.0, 2.0 + index, len(number))).sum()
    needed = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    return list(torch.autograd.grad(total, needed, retain_graph=True))


def test_a_worked_example() -> None:
    # Logits 0 and ln 3 at temperature 1: 1/4 and 3/4.
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3)]], requires_grad=True)
    logp, entropy = linear_log_probs(hidden, weight, torch.tensor([1]), entropy="gradient")
    assert entropy is not None
    assert logp.tolist() == pytest.approx([math.log(0.75)])
    assert entropy.tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3)])
    (found,) = torch.autograd.grad(logp.sum(), weight, retain_graph=True)
    assert found.tolist() == [[pytest.approx(-0.25)], [pytest.approx(0.25)]]
    (found,) = torch.autograd.grad(entropy.sum(), weight)
    slope = -0.75 * (math.log(0.75) + math.log(4) - 0.75 * math.log(3))
    assert found.tolist() == [[pytest.approx(-slope)], [pytest.approx(slope)]]


@any_entropy
@both
@pytest.mark.parametrize(("num", "chunk"), [(1, 256), (7, 3), (7, 1), (6, 3)])
def test_gradcheck_in_float64(num: int, chunk: int, has_bias: bool, entropy: Entropy) -> None:
    def numbers(*leaves: Any) -> tuple[torch.Tensor, ...]:
        hidden, weight, bias = (*leaves, None)[:3]
        found = linear_log_probs(hidden, weight, targets(num), 0.7, bias, chunk=chunk, entropy=entropy)
        return tuple(number for number in found if number is not None)

    leaves = [leaf for leaf in inputs(num, torch.float64, has_bias=has_bias) if leaf is not None]
    assert torch.autograd.gradcheck(numbers, leaves)


@any_entropy
@both
@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("temperature", [1.0, 0.5, torch.linspace(0.5, 2.0, 9)], ids=["1", "half", "each"])
def test_numbers_and_gradients_equal_those_from_logits(
    temperature: Temperature, chunk: int, has_bias: bool, entropy: Entropy
) -> None:
    hidden, weight, bias = leaves = inputs(9, has_bias=has_bias)
    found = linear_log_probs(hidden, weight, targets(9), temperature, bias, chunk=chunk, entropy=entropy)
    expected = naive(hidden, weight, bias, temperature, entropy)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for own, theirs in zip(gradients(found, leaves), gradients(expected, leaves), strict=True):
        assert (own - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_about_as_exact_as_plain_logits_in_it(dtype: torch.dtype) -> None:
    exact = inputs(300)
    half: list[Any] = [None if leaf is None else leaf.detach().to(dtype).requires_grad_() for leaf in exact]
    hidden, weight, _ = half
    found = linear_log_probs(hidden, weight, targets(300), 1.0, chunk=16, entropy="gradient")
    assert found[0].dtype == torch.float32
    truth_leaves = [hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    logits = truth_leaves[0] @ truth_leaves[1].T
    logp = logits.log_softmax(-1)
    truth = (logp.gather(-1, targets(300)[:, None])[:, 0], -(logp.exp() * logp).sum(-1))
    plain = naive(hidden, weight, None, 1.0, "gradient")
    for own, theirs, right in zip(found, plain, truth, strict=True):
        assert own is not None
        assert theirs is not None
        assert (own - right).abs().max() <= 1.01 * (theirs - right).abs().max()
    of_own, of_plain, of_truth = (
        gradients(numbers, leaves) for numbers, leaves in ((found, half), (plain, half), (truth, truth_leaves))
    )
    for own, theirs, right in zip(of_own, of_plain, of_truth, strict=True):
        assert own.dtype == dtype
        # The hidden states' is a sum over parts of the vocabulary, each rounded; the weight's is rounded once.
        assert (own - right).norm() <= 1.5 * (theirs - right).norm()


@any_entropy
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen: tuple[int, ...], entropy: Entropy) -> None:
    leaves = inputs(5, has_bias=True)
    for index in frozen:
        leaf = leaves[index]
        leaf.requires_grad_(False)
    hidden, weight, bias = leaves
    found = linear_log_probs(hidden, weight, targets(5), 1.0, bias, chunk=2, entropy=entropy)
    expected = naive(hidden, weight, bias, 1.0, entropy)
    torch.testing.assert_close(gradients(found, leaves), gradients(expected, leaves), rtol=1e-6, atol=1e-6)


@any_entropy
def test_without_tokens_every_gradient_is_zero_and_of_the_right_shape(entropy: Entropy) -> None:
    leaves = inputs(0, has_bias=True)
    hidden, weight, bias = leaves
    logp, _ = linear_log_probs(hidden, weight, targets(0), 1.0, bias, entropy=entropy)
    assert logp.shape == (0,)
    logp.sum().backward()
    for leaf in leaves:
        assert leaf.grad.shape == leaf.shape
        assert not leaf.grad.any()


def test_an_embedding_that_is_the_weight_too_gets_the_sum_of_both_gradients() -> None:
    ids = torch.tensor([0, 5, VOCABULARY - 1, 5])
    weight = inputs(4)[1]
    hidden = torch.tanh(weight[ids])
    logp, _ = linear_log_probs(hidden, weight, targets(4), chunk=2)
    expected, _ = naive(hidden, weight, None, 1.0, "off")
    (found,), (right,) = (gradients((number, None), [weight]) for number in (logp, expected))
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def test_entropy_without_gradient_has_none() -> None:
    hidden, weight, _ = inputs(3)
    logp, entropy = linear_log_probs(hidden, weight, targets(3), entropy="value")
    assert entropy is not None
    assert logp.requires_grad
    assert not entropy.requires_grad


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.999]], requires_grad=True)
    logp, entropy = linear_log_probs(hidden, weight, torch.tensor([0]), entropy="gradient")
    assert entropy is not None
    expected = numbers_from_logits(hidden @ weight.T, torch.tensor([0]), 1.0, "gradient")
    torch.testing.assert_close((logp, entropy), expected)
    (logp.sum() + entropy.sum()).backward()
    assert weight.grad is not None
    assert bool(weight.grad.isfinite().all())


@any_entropy
def test_no_tensor_is_larger_than_a_chunk_of_logits(entropy: Entropy) -> None:
    num, chunk = 200, 70
    hidden, weight, _ = inputs(num)
    with LargestTensor() as made:
        logp, second = linear_log_probs(hidden, weight, targets(num), chunk=chunk, entropy=entropy)
        (logp.sum() if second is None or not second.requires_grad else logp.sum() + second.sum()).backward()
    # In the backward a part of the vocabulary is a multiple of 64: with a vocabulary this small that is more.
    assert made.numel <= max(chunk * VOCABULARY, num * 64) < num * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_that_are_kept_give_what_computing_them_again_gives(dtype: torch.dtype) -> None:
    hidden, weight, _ = (None if leaf is None else leaf.detach().to(dtype).requires_grad_() for leaf in inputs(40))
    assert hidden is not None
    assert weight is not None
    kept, again = (linear_log_probs(hidden, weight, targets(40), 0.7, chunk=chunk)[0] for chunk in (40, 39))
    assert torch.equal(kept, again)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2  # the hidden states' is rounded once less
    for _ in range(2):  # the second time shows that the first left what was kept as it was
        of_kept = torch.autograd.grad(kept.sum(), (hidden, weight), retain_graph=True)
        of_again = torch.autograd.grad(again.sum(), (hidden, weight), retain_graph=True)
        for own, other in zip(of_kept, of_again, strict=True):
            assert (own - other).abs().max() <= tolerance * other.abs().max()
