"""Log-probs and entropy of a split vocabulary, against torch's own log_softmax over the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from verl_engine.engine.temperature import Temperature, column
from verl_megatron_mindspeed.forward import log_probs
from verl_megatron_mindspeed.forward.log_probs import split_log_probs

if TYPE_CHECKING:
    from verl_engine.engine.linear_log_probs import Entropy
    from verl_engine.testing.rank_pool import RankPool

NUM_ROWS, VOCAB = 5, 11
EACH = torch.linspace(0.5, 2.0, NUM_ROWS)


def plain(logits: torch.Tensor, targets: torch.Tensor, temperature: Temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy the simple way."""
    logp = (logits.double() / column(temperature)).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def example(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, targets and factors of the results."""
    random = torch.Generator().manual_seed(0)
    logits = (torch.randn(NUM_ROWS, VOCAB, generator=random) * 3).to(dtype)
    targets = torch.tensor([0, 10, 5, 6, 3])
    return logits, targets, torch.randn(2, NUM_ROWS, generator=random)


def test_two_tokens_worked_out_by_hand() -> None:
    # softmax(log 3, log 1) is (3/4, 1/4); its entropy is log 4 - 3/4 log 3.
    logits = torch.tensor([[3.0, 1.0]]).log().requires_grad_()
    logp, entropy = split_log_probs(logits * 1.0, torch.tensor([1]), 1.0, "value")
    assert entropy is not None
    torch.testing.assert_close(logp, torch.tensor([0.25]).log())
    torch.testing.assert_close(entropy, torch.tensor(4.0).log()[None] - 0.75 * torch.tensor(3.0).log())
    logp.sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.75, 0.75]]))


@pytest.mark.parametrize("block", [1 << 24, 2 * VOCAB])
@pytest.mark.parametrize("temperature", [1.0, 0.5, EACH], ids=["1", "half", "each"])
@pytest.mark.parametrize("entropy", ["gradient", "off"])
def test_values_and_gradients_are_those_of_log_softmax(
    monkeypatch: pytest.MonkeyPatch, block: int, temperature: Temperature, entropy: Entropy
) -> None:
    monkeypatch.setattr(log_probs, "_BLOCK_ELEMENTS", block)
    logits, targets, factors = example()
    logits.requires_grad_()
    found = [number for number in split_log_probs(logits.clone(), targets, temperature, entropy) if number is not None]
    expected = plain(logits, targets, temperature)[: len(found)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float())
    (gradient,) = torch.autograd.grad((factors[: len(found)] * torch.stack(found)).sum(), logits)
    (right,) = torch.autograd.grad((factors[: len(found)] * torch.stack(expected)).sum(), logits)
    torch.testing.assert_close(gradient, right)


def test_entropy_without_gradient_has_none() -> None:
    logits, targets, _ = example()
    logits.requires_grad_()
    logp, entropy = split_log_probs(logits * 1.0, targets, 1.0, "value")
    assert entropy is not None
    assert logp.requires_grad
    assert not entropy.requires_grad
    assert split_log_probs(logits, targets, 1.0, "off")[1] is None


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits, targets, _ = example(torch.bfloat16)
    logits.requires_grad_()
    logp, _ = split_log_probs(logits * 1.0, targets, 1.0, "off")
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, plain(logits, targets, 1.0)[0].float())
    logp.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16


def test_the_backward_writes_over_the_logits_and_refuses_to_run_twice() -> None:
    logits, targets, _ = example()
    made = logits.requires_grad_() * 1.0
    logp, _ = split_log_probs(made, targets, 1.0, "off")
    logp.sum().backward(retain_graph=True)
    assert logits.grad is not None
    assert torch.equal(made.detach(), logits.grad)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


@pytest.mark.parametrize("temperature", [0.5, EACH], ids=["half", "each"])
@pytest.mark.parametrize("cut", [6, VOCAB])
def test_two_ranks_that_split_the_vocabulary_find_the_same(ranks: RankPool, cut: int, temperature: Temperature) -> None:
    ranks.run(check_split, cut, temperature)


def check_split(rank: int, cut: int, temperature: Temperature) -> None:
    """Compare, on each rank, its part; the second may have none of the vocabulary."""
    logits, targets, factors = example()
    own = slice(0, cut) if rank == 0 else slice(cut, VOCAB)
    part = logits[:, own].clone().requires_grad_()
    found = split_log_probs(part.clone(), targets, temperature, "gradient", first=own.start, group=dist.group.WORLD)
    assert found[1] is not None
    logits.requires_grad_()
    expected = plain(logits, targets, temperature)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.float())
    (gradient,) = torch.autograd.grad((factors[0] * found[0] + factors[1] * found[1]).sum(), part)
    (right,) = torch.autograd.grad((factors[0] * expected[0] + factors[1] * expected[1]).sum(), logits)
    torch.testing.assert_close(gradient, right[:, own])


@pytest.mark.parametrize("temperature", [0.5, EACH], ids=["half", "each"])
@pytest.mark.parametrize("cut", [2, 6, VOCAB])
@pytest.mark.parametrize("top_k", [0, 4, VOCAB])
def test_ids_are_those_of_the_whole_vocabulary(ranks: RankPool, top_k: int, cut: int, temperature: Temperature) -> None:
    ranks.run(check_chosen, top_k, cut, temperature)


def check_chosen(rank: int, top_k: int, cut: int, temperature: Temperature) -> None:
    """Compare log-probs of given ids, or of the highest; logits are full of ties across the cut."""
    logits, targets, _ = example()
    logits = logits.round()
    random = torch.Generator().manual_seed(1)
    ids = torch.cat([targets[:, None], torch.randint(0, VOCAB, (NUM_ROWS, top_k or 3), generator=random)], dim=1)
    right_ids = ids.clone()
    if top_k:
        right_ids[:, 1:] = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    own = slice(0, cut) if rank == 0 else slice(cut, VOCAB)
    part = logits[:, own].clone().requires_grad_()
    found, _ = split_log_probs(
        part.clone(), ids, temperature, "off", first=own.start, group=dist.group.WORLD, top_k=top_k
    )
    assert torch.equal(ids, right_ids)
    logits.requires_grad_()
    expected = (logits.double() / column(temperature)).log_softmax(-1).gather(1, right_ids)
    torch.testing.assert_close(found, expected.float())
    factors = torch.randn(found.shape, generator=random)
    (gradient,) = torch.autograd.grad((factors * found).sum(), part)
    (right,) = torch.autograd.grad((factors * expected).sum(), logits)
    torch.testing.assert_close(gradient, right[:, own])
