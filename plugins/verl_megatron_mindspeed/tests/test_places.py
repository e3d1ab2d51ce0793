"""Which ranks hold what of a parameter follows from its name. Nothing here needs Megatron."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_engine.contract.errors import ModelError
from verl_megatron_mindspeed.weights.places import Place, find_places


def _place(name: str, parameter: torch.Tensor, names: list[str], *, head: str = "language_model") -> Place:
    """Find the place of the only parameter of a model, on the second of four ranks, two for each expert's matrix."""
    part = SimpleNamespace(named_parameters=lambda: [(name, parameter)])
    model: Any = SimpleNamespace(
        parts=lambda: [part],
        global_name=lambda chunk, local: local if chunk == 0 else "",
        hf_names=lambda _: names,
        transformer=SimpleNamespace(num_attention_heads=4, num_query_groups=4, kv_channels=1),
        vocab_size=7,
        head=head,
        tied=True,
    )
    parallel: Any = SimpleNamespace(
        tensor=SimpleNamespace(rank=1, size=4), expert_tensor=SimpleNamespace(rank=1, size=2)
    )
    [place] = find_places(model, parallel)
    return place


@pytest.mark.parametrize("name", ["linear_fc{}.weight5", "local_experts.5.linear_fc{}.weight"])
def test_experts_of_either_kind_are_divided_among_their_own_ranks_without_marks(name: str) -> None:
    first = _place("decoder.layers.0.mlp.experts." + name.format(1), torch.zeros(6, 2), ["gate", "up"])
    assert [(piece.whole_shape, piece.offsets) for piece in first.pieces] == [((6, 2), (3, 0)), ((6, 2), (3, 0))]
    second = _place("decoder.layers.0.mlp.experts." + name.format(2), torch.zeros(2, 3), ["down"])
    assert [(piece.whole_shape, piece.offsets) for piece in second.pieces] == [((2, 6), (0, 3))]
    assert not first.is_replica
    assert not second.is_replica


@pytest.mark.parametrize(
    ("name", "shape", "whole", "offsets"),
    [
        ("decoder.layers.0.self_attention.linear_proj.weight", (4, 2), (4, 8), (0, 2)),
        ("decoder.layers.0.mlp.shared_experts.linear_fc2.weight", (4, 2), (4, 8), (0, 2)),
        ("embedding.word_embeddings.weight", (2, 3), (7, 3), (2, 0)),
        ("output_layer.weight", (2, 3), (7, 3), (2, 0)),
    ],
)
def test_what_is_divided_by_tensor_parallelism(
    name: str, shape: tuple[int, ...], whole: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    place = _place(name, torch.zeros(shape), ["w"])
    assert [(piece.whole_shape, piece.offsets) for piece in place.pieces] == [(whole, offsets)]
    assert not place.is_replica
    assert place.is_copy == (name == "output_layer.weight")


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.0.mlp.router.weight",
        "decoder.final_layernorm.weight",
    ],
)
def test_what_every_tensor_parallel_rank_holds_is_a_replica_on_all_but_the_first(name: str) -> None:
    place = _place(name, torch.zeros(5), ["w"])
    assert [(piece.whole_shape, piece.offsets) for piece in place.pieces] == [((5,), (0,))]
    assert place.is_replica


def test_a_value_head_is_whole_on_every_rank() -> None:
    place = _place("output_layer.weight", torch.zeros(1, 3), ["score.weight"], head="value")
    assert [(piece.whole_shape, piece.offsets) for piece in place.pieces] == [((1, 3), (0, 0))]
    assert place.is_replica


def test_what_is_made_of_weights_in_an_unknown_way_is_refused() -> None:
    with pytest.raises(ModelError, match="is made of a, b, and it is not known how"):
        _place("decoder.layers.0.mlp.router.weight", torch.zeros(2, 2), ["a", "b"])
    with pytest.raises(ModelError, match=r"has shape \(1, 1, 1\); only vectors and matrices"):
        _place("decoder.layers.0.mlp.router.weight", torch.zeros(1, 1, 1), ["a"])
