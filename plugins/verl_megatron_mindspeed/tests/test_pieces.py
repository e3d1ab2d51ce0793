"""How parameters are made of rows of Hugging Face weights. Nothing here needs Megatron."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_engine.engine.weights.shards import shard_of
from verl_megatron_mindspeed.weights.pieces import (
    Block,
    Heads,
    Piece,
    Split,
    attention_pieces,
    gated_pieces,
    plain_pieces,
    rectangles,
)

WHOLE = Split(None, 0, 1)


@given(
    st.integers(1, 7).flatmap(
        lambda width: st.tuples(
            st.just(width), st.tuples(st.integers(0, 6 * width), st.integers(0, 6 * width)).map(sorted)
        )
    )
)
def test_a_flat_range_is_at_most_three_rectangles_that_cover_it_in_order(case: tuple[int, list[int]]) -> None:
    width, (begin, end) = case
    found = list(rectangles(begin, end, width))
    assert len(found) <= 3
    elements: list[int] = []
    for row, column, num_rows, num_columns in found:
        assert num_rows > 0
        assert 0 < num_columns <= width - column
        assert num_rows == 1 or num_columns == width  # or it would not be contiguous
        first = row * width + column
        elements += range(first, first + num_rows * num_columns)
    assert elements == list(range(begin, end))


def test_a_flat_range_begins_and_ends_in_the_middle_of_rows() -> None:
    # Elements 2 to 9 of a matrix three wide: the end of row 0, rows 1 and 2 whole; then to 10, the start of row 3.
    assert list(rectangles(2, 10, 3)) == [(0, 2, 1, 1), (1, 0, 2, 3), (3, 0, 1, 1)]


@st.composite
def _cut_parameters(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Draw a shape, at which rows it is cut into pieces, and at which elements into the shards of an optimizer."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
    size = torch.Size(shape).numel()
    rows = sorted(draw(st.sets(st.integers(1, shape[0]), max_size=3)) | {0, shape[0]})
    elements = sorted(draw(st.sets(st.integers(1, size), max_size=3)) | {0, size})
    return shape, rows, elements


@given(_cut_parameters())
def test_the_shards_of_any_optimizer_cover_the_weights_once_and_are_live(
    case: tuple[tuple[int, ...], list[int], list[int]],
) -> None:
    shape, rows, elements = case
    parameter = torch.arange(1.0, torch.Size(shape).numel() + 1).view(shape)
    flat = parameter.clone().view(-1)
    for first, end in pairwise(rows):
        above = 2  # the piece lies two rows down in its weight
        whole_shape = (above + end - first, *shape[1:])
        piece = Piece("w", whole_shape, (above, *(0 for _ in shape[1:])), parameter, first, end - first)
        whole = torch.zeros(whole_shape)
        for begin, stop in pairwise(elements):
            parts = list(piece.parts((begin, flat[begin:stop])))
            assert len(parts) <= 3
            for offsets, part in parts:
                assert part.ndim == parameter.ndim
                assert part.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
                shard_of(whole, offsets, part.shape).add_(part)
        assert torch.equal(whole[above:], parameter[first:end])
        assert not whole[:above].any()


def test_nothing_that_is_held_gives_no_part_and_a_whole_one_gives_its_rows() -> None:
    parameter = torch.arange(6.0).view(3, 2)
    piece = Piece("w", (8, 2), (6, 0), parameter, 1, 2)
    assert list(piece.parts(None)) == []
    [(offsets, part)] = piece.parts(parameter)
    assert offsets == (6, 0)
    assert torch.equal(part, parameter[1:])
    part.zero_()
    assert parameter.tolist() == [[0, 1], [0, 0], [0, 0]]


def test_queries_keys_and_values_of_two_groups() -> None:
    # Four query heads, two groups, heads of one number: rows q0 q1 k0 v0 | q2 q3 k1 v1; the second rank has the latter.
    stack = torch.tensor([[0.0], [1], [10], [20], [2], [3], [11], [21]])
    heads = Heads(num_query=4, num_key_value=2, dim=1)
    whole = _blocks(attention_pieces(["q", "k", "v"], stack, WHOLE, heads))
    assert {name: block.content().flatten().tolist() for name, block in whole.items()} == {
        "q": [0, 1, 2, 3],
        "k": [10, 11],
        "v": [20, 21],
    }
    second = _blocks(attention_pieces(["q", "k", "v"], stack[4:], Split(0, 1, 2), heads))
    assert {name: (block.offsets, block.shape, block.whole_shape) for name, block in second.items()} == {
        "q": ((2, 0), (2, 1), (4, 1)),
        "k": ((1, 0), (1, 1), (2, 1)),
        "v": ((1, 0), (1, 1), (2, 1)),
    }


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_more_ranks_than_query_groups_divide_a_group(num_ranks: int) -> None:
    # Two groups of two query heads with three numbers each: 24 rows, of which 8 ranks have three each.
    heads = Heads(num_query=4, num_key_value=2, dim=3)
    stack = torch.arange(24.0)
    expected = {
        "q": torch.cat([stack[:6], stack[12:18]]),
        "k": torch.cat([stack[6:9], stack[18:21]]),
        "v": torch.cat([stack[9:12], stack[21:]]),
    }
    found = {name: torch.full_like(whole, -1) for name, whole in expected.items()}
    for rank, shard in enumerate(stack.chunk(num_ranks)):
        for name, block in _blocks(attention_pieces(["q", "k", "v"], shard, Split(0, rank, num_ranks), heads)).items():
            assert block.whole_shape == tuple(expected[name].shape)
            shard_of(found[name], block.offsets, block.shape).copy_(block.content())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_gated_matrix_has_both_halves_of_each_rank() -> None:
    # The gate's four rows and the other half's, on two ranks: the second has rows 2 and 3 of both.
    parameter = torch.tensor([[2.0], [3], [12], [13]])
    found = _blocks(gated_pieces(["gate", "up"], parameter, Split(0, 1, 2)))
    assert {name: (block.offsets, block.whole_shape) for name, block in found.items()} == {
        "gate": ((2, 0), (4, 1)),
        "up": ((2, 0), (4, 1)),
    }
    assert found["up"].content().flatten().tolist() == [12, 13]


def test_padding_of_the_vocabulary_is_in_no_weight() -> None:
    # Five tokens on four ranks take two rows each: the third rank has one of padding, the fourth nothing else.
    shards = [plain_pieces("w", torch.zeros(2, 3), Split(0, rank, 4), 5) for rank in range(4)]
    assert [[(piece.offsets, piece.num_rows) for piece in shard] for shard in shards] == [
        [((0, 0), 2)],
        [((2, 0), 2)],
        [((4, 0), 1)],
        [],
    ]
    assert {piece.whole_shape for shard in shards for piece in shard} == {(5, 3)}


def test_columns_are_divided_where_a_layer_takes_parts_of_its_input() -> None:
    [piece] = plain_pieces("w", torch.zeros(4, 3), Split(1, 1, 2))
    assert (piece.whole_shape, piece.offsets, piece.shape) == ((4, 6), (0, 3), (4, 3))


def test_a_block_is_live_in_one_piece_and_is_filled_in_several() -> None:
    parameter = torch.arange(4.0).view(4, 1)
    lower, upper = (Piece("w", (4, 1), (row, 0), parameter, 2 - row, 2) for row in (0, 2))
    Block.of([lower]).content().zero_()
    assert parameter.flatten().tolist() == [0, 1, 0, 0]
    block = Block.of([upper, lower])
    block.fill(torch.tensor([[5.0], [6], [7], [8]]))
    assert parameter.flatten().tolist() == [7, 8, 5, 6]
    assert block.content().flatten().tolist() == [5, 6, 7, 8]


def test_a_block_follows_a_parameter_whose_memory_moved() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    block = Block.of(plain_pieces("w", parameter, WHOLE))
    parameter.data = torch.ones(2, 2)  # as Megatron does when it lays parameters into its buffers
    assert block.content().sum() == 4


def _blocks(pieces: list[Piece]) -> dict[str, Block]:
    return {name: Block.of([piece for piece in pieces if piece.name == name]) for name in {p.name for p in pieces}}
