"""The norm and the clipping of shards, where a rank holds none, or only empty ones."""

from __future__ import annotations

import pytest
import torch

from verl_engine.testing.ranks import run_ranks
from verl_fsdp.grad_norm import clip_gradients, grad_norm


def norm_and_clipped(rank: int) -> tuple[float, list[float]]:
    """Rank 0 holds (3, 4) and a parameter without gradient, rank 1 an empty shard."""
    shard = torch.nn.Parameter(torch.zeros(2 if rank == 0 else 0))
    shard.grad = torch.tensor([3.0, 4.0])[: len(shard)]
    parameters = [shard, torch.nn.Parameter(torch.zeros(1))]
    norm = grad_norm(parameters, None)
    clip_gradients(parameters, norm, 1.0)
    return float(norm), shard.grad.tolist()


@pytest.mark.dist
def test_a_rank_with_empty_shards_has_part_in_the_norm() -> None:
    (norm, clipped), (norm_of_other, clipped_of_other) = run_ranks(norm_and_clipped)
    assert norm == norm_of_other == 5.0
    assert clipped == pytest.approx([0.6, 0.8])
    assert clipped_of_other == []


def norm_of_nothing(_rank: int) -> float:
    return float(grad_norm([torch.nn.Parameter(torch.zeros(2))], None))


@pytest.mark.dist
def test_without_any_gradient_the_norm_is_zero() -> None:
    assert run_ranks(norm_of_nothing, world_size=1) == [0.0]
