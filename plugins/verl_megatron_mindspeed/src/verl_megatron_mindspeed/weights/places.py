"""Which pieces each parameter of this rank's Megatron model is made of.

All follows from names and sizes. Megatron's marks on parameters (`tensor_model_parallel`, `partition_dim`) are not
asked: they are not there on matrices that were not initialized, nor on the grouped experts of Transformer Engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from verl_engine.contract.errors import ModelError
from verl_megatron_mindspeed.weights.pieces import (
    Block,
    Heads,
    Piece,
    Split,
    attention_pieces,
    gated_pieces,
    plain_pieces,
)

if TYPE_CHECKING:
    from verl_megatron_mindspeed.model.build import MegatronModel
    from verl_megatron_mindspeed.parallel import Parallel

_EXPERT: Final = re.compile(r"\.experts\.")
_EMBEDDING: Final = "embedding.word_embeddings.weight"
_OUTPUT: Final = "output_layer.weight"
_QKV: Final = re.compile(r"\.self_attention\.linear_qkv\.(weight|bias)$")
_FC1: Final = re.compile(r"\.linear_fc1\.(weight|bias)\d*$")
_ROWS_SPLIT: Final = re.compile(r"\.linear_(qkv|fc1)\.(weight|bias)\d*$")
_COLUMNS_SPLIT: Final = re.compile(r"\.linear_(proj|fc2)\.weight\d*$")


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter, and what it is made of."""

    parameter: torch.Tensor
    pieces: tuple[Piece, ...]
    is_copy: bool
    """Whether it follows the embedding, which another pipeline stage holds."""
    is_replica: bool
    """Whether an earlier tensor-parallel rank holds the same."""


def find_places(model: MegatronModel, parallel: Parallel) -> list[Place]:
    """Go through the parameters of all chunks; ModelError for those of unknown weights, or of more than two dims."""
    return [
        _place(model.global_name(chunk, name), parameter, model, parallel)
        for chunk, part in enumerate(model.parts())
        for name, parameter in part.named_parameters()
    ]


def blocks_of(places: list[Place]) -> dict[str, Block]:
    """Put together what this rank holds of each weight."""
    found: dict[str, list[tuple[Piece, Place]]] = {}
    for place in places:
        for piece in place.pieces:
            found.setdefault(piece.name, []).append((piece, place))
    return {
        name: Block.of(
            [piece for piece, _ in held],
            is_copy=any(place.is_copy for _, place in held),
            is_replica=any(place.is_replica for _, place in held),
        )
        for name, held in found.items()
    }


def _place(name: str, parameter: torch.Tensor, model: MegatronModel, parallel: Parallel) -> Place:
    if parameter.ndim not in (1, 2):
        raise ModelError(f"Megatron's {name} has shape {tuple(parameter.shape)}; only vectors and matrices are known")
    is_expert = _EXPERT.search(name) is not None
    is_vocabulary = name == _EMBEDDING or (name == _OUTPUT and model.head != "value")
    dim = 0 if is_vocabulary or _ROWS_SPLIT.search(name) else 1 if _COLUMNS_SPLIT.search(name) else None
    group = parallel.expert_tensor if is_expert else parallel.tensor
    split = Split(dim, group.rank, group.size)
    return Place(
        parameter,
        tuple(_pieces(name, parameter, model, split, is_vocabulary=is_vocabulary)),
        is_copy=model.tied and name == _OUTPUT,
        is_replica=dim is None and group.rank > 0,
    )


def _pieces(
    name: str, parameter: torch.Tensor, model: MegatronModel, split: Split, *, is_vocabulary: bool
) -> list[Piece]:
    names = model.hf_names(name)
    if _QKV.search(name):
        transformer = model.transformer
        heads = Heads(transformer.num_attention_heads, transformer.num_query_groups, transformer.kv_channels)
        return attention_pieces(names, parameter, split, heads)
    if len(names) == 1:
        return plain_pieces(names[0], parameter, split, model.vocab_size if is_vocabulary else None)
    if _FC1.search(name):
        return gated_pieces(names, parameter, split)
    raise ModelError(f"Megatron's {name} is made of {', '.join(names)}, and it is not known how")
