"""Experts that come with sequences: what is taken, and where each token finds its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError
from verl_engine.engine.routed_experts import choose, experts_of, given_experts, put_back


def batch_of(*tokens: Any) -> PackedBatch:
    """Pack one sequence of two tokens with the experts of each."""
    field = {"routed_experts": np.array(tokens)} if tokens else {}
    return PackedBatch.from_sequences([Sequence(np.array([3, 4]), np.array([False, True]), field)])


def test_sequences_bring_experts_or_none() -> None:
    given = [[[0, 2], [-1, -1]], [[3, 1], [1, 0]]]
    found = given_experts(batch_of(*given), num_layers=2, num_experts=4)
    assert found is not None
    assert (found.tolist(), found.dtype) == (given, torch.int64)
    assert given_experts(batch_of(), num_layers=2, num_experts=4) is None


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ([[0, 1]], "it must be whole numbers of .*, and the model has 1 such layers"),
        ([[[0, 1], [0, 1]]], "the model has 1 such layers"),
        ([[[0.0, 1.0]]], "torch.float64"),
        ([[[0, 4]]], "from 0 to 3"),
        ([[[-2, -1]]], "from 0 to 3"),
        ([[[1, 1]]], "different experts"),
        ([[[-1, 1]]], "be -1 throughout"),
    ],
)
def test_what_no_router_could_choose_is_refused(experts: Any, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        given_experts(batch_of(*experts, *experts), num_layers=1, num_experts=4)


def test_a_rank_finds_its_tokens_and_puts_them_back() -> None:
    experts = torch.arange(6).view(3, 1, 2)
    source = torch.tensor([2, -1, 0])
    own = experts_of(experts, source)
    assert own.tolist() == [[[4, 5]], [[-1, -1]], [[0, 1]]]
    assert put_back(own, source, 3).tolist() == [[[0, 1]], [[0, 0]], [[4, 5]]]


def test_a_choice_keeps_the_routers_scores_and_their_gradient() -> None:
    scores = torch.tensor([[0.1, 0.2, 0.7], [0.5, 0.3, 0.2]], requires_grad=True)
    own = scores.topk(2).indices
    values, experts = choose(scores, own, torch.tensor([[1, 0], [-1, -1]]))
    assert experts.tolist() == [[1, 0], [0, 1]]
    assert values.tolist() == [pytest.approx([0.2, 0.1]), pytest.approx([0.5, 0.3])]
    values[:, 0].sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [[0, 1, 0], [1, 0, 0]]
    with pytest.raises(BatchError, match="3 experts for each of 2 tokens, and the model's routers choose 2"):
        choose(scores, own, torch.zeros(2, 3, dtype=torch.int64))
