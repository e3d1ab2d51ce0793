"""How a rank's Megatron parameter is made of rows of Hugging Face weights.

Each parameter is a stack of row blocks, each of them a rectangle of one weight: the rows of a query group in the fused
query-key-value matrix, one half of a gated matrix, an expert's matrix, or simply the rank's shard of one weight.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Self

import torch

Held = torch.Tensor | tuple[int, torch.Tensor] | None
"""What a rank keeps for a parameter, such as a float32 master: a tensor of its shape, or a flat range of it with the
number of its first element, or nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a parameter, and where they lie in a Hugging Face weight."""

    name: str
    """Of the weight."""
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the rows begin in the weight, one number per dim."""
    parameter: torch.Tensor
    """As many dims as the weight: one or two."""
    first_row: int
    num_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rectangle."""
        return (self.num_rows, *self.parameter.shape[1:])

    def rows_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these rows, live and detached, of the parameter as it is now, or of a tensor of its shape."""
        return tensor.detach().narrow(0, self.first_row, self.num_rows)

    def parts(self, held: Held) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield where rectangles of the weight begin in it that are held of this piece, and their live content.

        A flat range gives three at most: the end of a row, whole rows, and the beginning of one.
        """
        if isinstance(held, torch.Tensor):
            yield self.offsets, self.rows_of(held)
        elif held is not None:
            yield from self._parts_of_range(*held)

    def _parts_of_range(self, start: int, flat: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        width = prod(self.parameter.shape[1:])
        shift = self.first_row * width - start  # from the piece's elements to those of the range
        begin = max(0, -shift)
        end = min(self.num_rows * width, flat.numel() - shift)
        content = flat.detach()
        for row, column, num_rows, num_columns in rectangles(begin, end, width):
            first = row * width + column + shift
            part = content[first : first + num_rows * num_columns]
            is_vector = self.parameter.ndim == 1
            place = (row,) if is_vector else (row, column)
            offsets = tuple(offset + inner for offset, inner in zip(self.offsets, place, strict=True))
            yield offsets, part if is_vector else part.view(num_rows, num_columns)


def rectangles(begin: int, end: int, width: int) -> Iterator[tuple[int, int, int, int]]:
    """Divide elements ``begin`` to ``end`` of a row-major matrix into rectangles, each contiguous; three at most.

    Yields first row, first column, number of rows, number of columns.
    """
    if begin < end and begin % width:
        row, column = divmod(begin, width)
        length = min(width - column, end - begin)
        yield row, column, 1, length
        begin += length
    if end - begin >= width:
        num_rows = (end - begin) // width
        yield begin // width, 0, num_rows, width
        begin += num_rows * width
    if begin < end:
        yield begin // width, 0, 1, end - begin


@dataclass(frozen=True, slots=True)
class Split:
    """How the whole of a parameter is divided among ranks."""

    dim: int | None
    """None where every rank holds all of it."""
    rank: int
    size: int

    def offset(self, dim: int, length: int) -> int:
        """Return where this rank's shard begins, which is ``length`` long."""
        return self.rank * length if dim == self.dim else 0

    def whole(self, dim: int, length: int) -> int:
        """Return the length of all shards together."""
        return length * self.size if dim == self.dim else length


def plain_pieces(name: str, parameter: torch.Tensor, split: Split, num_rows: int | None = None) -> list[Piece]:
    """Take a parameter that is a shard of one weight.

    That has `num_rows` where the parameter's last rows, those of all ranks together, are padding.
    """
    shape = tuple(split.whole(dim, length) for dim, length in enumerate(parameter.shape))
    offsets = tuple(split.offset(dim, length) for dim, length in enumerate(parameter.shape))
    kept = parameter.shape[0]
    if num_rows is not None:
        shape = (num_rows, *shape[1:])
        kept = max(0, min(kept, num_rows - offsets[0]))
    return [Piece(name, shape, offsets, parameter, 0, kept)] if kept else []


def gated_pieces(names: Sequence[str], parameter: torch.Tensor, split: Split) -> list[Piece]:
    """Take the first matrix of a gated feed-forward: the gate's rows above those of the other half."""
    num_rows = parameter.shape[0] // 2
    pieces = []
    for half, name in enumerate(names):
        shape = (split.whole(0, num_rows), *parameter.shape[1:])
        offsets = (split.offset(0, num_rows), *(0 for _ in shape[1:]))
        pieces.append(Piece(name, shape, offsets, parameter, half * num_rows, num_rows))
    return pieces


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of an attention layer."""

    num_query: int
    num_key_value: int
    """Query groups: each has one head for keys and one for values."""
    dim: int


def attention_pieces(names: Sequence[str], parameter: torch.Tensor, split: Split, heads: Heads) -> list[Piece]:
    """Take the fused query-key-value matrix, or its bias: for each query group its queries, its key, its value.

    The ranks divide the stack of all groups into equal runs of rows, so a run may begin and end inside a group: that is
    where there are fewer groups than ranks.
    """
    first = split.offset(0, parameter.shape[0])
    end = first + parameter.shape[0]
    per_group = (heads.num_query // heads.num_key_value * heads.dim, heads.dim, heads.dim)
    pieces = []
    row = 0  # of the whole stack
    for group in range(heads.num_key_value):
        for name, length in zip(names, per_group, strict=True):
            begin, stop = max(row, first), min(row + length, end)
            if begin < stop:
                shape = (heads.num_key_value * length, *parameter.shape[1:])
                offsets = (group * length + begin - row, *(0 for _ in shape[1:]))
                pieces.append(Piece(name, shape, offsets, parameter, begin - first, stop - begin))
            row += length
    return pieces


@dataclass(frozen=True, slots=True)
class Block:
    """All that a rank holds of one weight, in one rectangle: what it shows to the outside."""

    pieces: tuple[Piece, ...]
    """At least one; each goes on where the one before ends."""
    is_copy: bool
    """Whether it follows a weight that another rank holds: the output layer of a tied model."""
    is_replica: bool
    """Whether an earlier tensor-parallel rank holds the same."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], *, is_copy: bool = False, is_replica: bool = False) -> Self:
        """Put pieces of the same weight together."""
        ordered = tuple(sorted(pieces, key=lambda piece: piece.offsets))
        gaps = (upper.offsets[0] + upper.num_rows != lower.offsets[0] for upper, lower in pairwise(ordered))
        assert not any(gaps), f"{ordered[0].name} lies in pieces apart"
        return cls(ordered, is_copy, is_replica)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return self.pieces[0].whole_shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.pieces[0].parameter.dtype

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where it begins in the weight."""
        return self.pieces[0].offsets

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the rectangle."""
        return (sum(piece.num_rows for piece in self.pieces), *self.pieces[0].shape[1:])

    def content(self) -> torch.Tensor:
        """Return the rectangle: live where it lies in one piece, else a copy."""
        views = [piece.rows_of(piece.parameter) for piece in self.pieces]
        return views[0] if len(views) == 1 else torch.cat(views)

    def fill(self, content: torch.Tensor) -> None:
        """Copy a rectangle of this shape into the parameters."""
        rows = content.detach().split([piece.num_rows for piece in self.pieces])
        for piece, part in zip(self.pieces, rows, strict=True):
            piece.rows_of(piece.parameter).copy_(part)

    def parts(self, get: Callable[[torch.Tensor], Held]) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield what is held of the weight as rectangles, where `get` gives it for a parameter; see `Piece.parts`."""
        for piece in self.pieces:
            yield from piece.parts(get(piece.parameter))
