"""Which tokens of a packed micro-batch one rank runs. Imports no Megatron.

Ranks that split sequences (context parallelism) each take two pieces of every sequence, one from either end: sequences
are cut into 2 * C equal pieces, and rank r takes pieces r and 2C - 1 - r. So causal attention is the same work for all.
Each sequence is filled up to a multiple of 2C for that; what fills it up comes last, where no real token looks at it.

Shape legend: T tokens of the micro-batch, t those of this rank, N sequences, C ranks that split them.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Places:
    """Where this rank's tokens come from, and where they go."""

    lengths: tuple[int, ...]
    """Of each sequence, filled up; those that only fill up included."""
    source: Indices
    """[t]: for each token of this rank its index among the T, -1 for filling."""
    positions: Indices
    """[t]: its position in its sequence."""
    place: Indices
    """[T]: for each token of the micro-batch its index among this rank's, -1 for those that other ranks run."""


def find_places(lengths: tuple[int, ...], num_splits: int = 1, split: int = 0, multiple: int = 1) -> Places:
    """Divide the tokens of a micro-batch with N `lengths` over C = `num_splits` ranks.

    A sequence of filling at the end makes t a multiple of `multiple`.
    """
    pieces = 2 * num_splits if num_splits > 1 else 1
    filled = [-(-length // pieces) * pieces for length in lengths]
    # Each rank has an even number of each sequence's tokens where sequences are split, and filling must keep to that.
    step = math.lcm(multiple, pieces // num_splits)
    missing = -(sum(filled) // num_splits) % step
    starts = np.cumsum([0, *lengths])
    sources, positions = [], []
    for start, length, whole in zip(starts, (*lengths, 0), (*filled, missing * num_splits), strict=True):
        own = _own_positions(whole, num_splits, split)
        positions.append(own)
        sources.append(np.where(own < length, own + start, -1))
    source = np.concatenate(sources)
    place = np.full(int(starts[-1]), -1, dtype=np.int64)
    is_real = source >= 0
    place[source[is_real]] = np.flatnonzero(is_real)
    found = (*filled, missing * num_splits) if missing else tuple(filled)
    return Places(tuple(found), source, np.concatenate(positions), place)


def _own_positions(length: int, num_splits: int, split: int) -> Indices:
    """Return the positions that a rank takes of one sequence: all of it, or a piece from either end."""
    if num_splits == 1:
        return np.arange(length, dtype=np.int64)
    piece = length // (2 * num_splits)
    first = np.arange(split * piece, (split + 1) * piece, dtype=np.int64)
    last = np.arange(length - (split + 1) * piece, length - split * piece, dtype=np.int64)
    return np.concatenate([first, last])
