"""Uniform random numbers that belong to a request: number i of its stream draws its token i.

The generator is counter-based (Philox), so any number of any stream can be had without those before it. What a request
draws therefore depends neither on the rest of the batch nor on how often it was interrupted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORD: Final = 2**64
_NUMBERS_PER_COUNT: Final = 4
"""One step of Philox's counter yields four 64-bit words, and a float64 takes one word."""


def uniform_numbers(seeds: Sequence[int], starts: Sequence[int], count: int) -> np.ndarray:
    """Cut the numbers ``start`` to ``start + count - 1`` out of each seed's stream.

    The numbers are those of ``numpy.random.Generator(numpy.random.Philox(key=seed)).random(...)``.

    Args:
        seeds: One stream each; taken modulo 2**128.
        starts: Position in each stream of the first number wanted.
        count: Numbers wanted of each stream.
    Returns:
        [len(seeds), count] float64 in [0, 1).
    """
    bits = np.random.Philox(key=0)
    generator = np.random.Generator(bits)
    state = bits.state
    numbers = np.empty((len(seeds), count))
    for row, seed, start in zip(numbers, seeds, starts, strict=True):
        counts, skipped = divmod(start, _NUMBERS_PER_COUNT)
        # Setting the state of one generator takes 3 us, building a new one 50.
        state["state"] = {
            "counter": np.array([counts, 0, 0, 0], dtype=np.uint64),
            "key": np.array([seed % _WORD, seed // _WORD % _WORD], dtype=np.uint64),
        }
        bits.state = state
        row[:] = generator.random(skipped + count)[skipped:]
    return numbers
