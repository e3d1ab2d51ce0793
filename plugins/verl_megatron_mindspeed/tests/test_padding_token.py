"""The embedding of the padding token gets no gradient."""

from __future__ import annotations

import pytest
import torch

from verl_megatron_mindspeed.forward.padding_token import exclude_padding_token


class Embedding(torch.nn.Embedding):
    """As much of Megatron's as is looked at."""

    reduce_scatter_embeddings = False


class SplitEmbedding(Embedding):
    """With sequence parallelism each of two ranks gets half of the tokens, in Megatron's order of dims."""

    reduce_scatter_embeddings = True
    rank = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return [t / 2, 1, H]."""
        return super().forward(ids).transpose(0, 1).chunk(2)[self.rank]


class Ranks:
    """Two tensor-parallel ranks."""

    rank = 0
    size = 2


def gradient(embedding: Embedding, token: int | None, rank: int = 0) -> list[float]:
    """Look up tokens 1, 2, 2, 0 and return the gradient of each row."""
    group = Ranks()
    group.rank = rank
    exclude_padding_token(embedding, token, 3, group)  # type: ignore[arg-type] # has what it needs of a group
    embedding(torch.tensor([[1, 2, 2, 0]])).sum().backward()
    assert embedding.weight.grad is not None
    return [float(row) for row in embedding.weight.grad[:, 0]]


@pytest.mark.parametrize(("token", "right"), [(None, [1, 1, 2]), (2, [1, 1, 0]), (-1, [1, 1, 0]), (0, [0, 1, 2])])
def test_only_rows_of_other_tokens_are_trained(token: int | None, right: list[float]) -> None:
    assert gradient(Embedding(3, 2), token) == right


def test_each_rank_looks_at_its_own_tokens() -> None:
    for rank, right in enumerate(([0, 1, 0], [1, 0, 0])):
        embedding = SplitEmbedding(3, 2)
        embedding.rank = rank
        assert gradient(embedding, 2, rank) == right


def test_inference_needs_nothing() -> None:
    embedding = Embedding(3, 2)
    exclude_padding_token(embedding, 0, 3, Ranks())  # type: ignore[arg-type] # has what it needs of a group
    with torch.no_grad():
        assert embedding(torch.tensor([[0]])).shape == (1, 1, 2)
