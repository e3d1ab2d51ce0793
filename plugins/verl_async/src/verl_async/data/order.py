"""In which order the rows of a job's files are drawn."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt


class EpochOrder:
    """Row indices without end, epoch after epoch; each epoch visits every row once.

    An epoch's order depends on ``seed`` and the epoch's number only, so that an order rebuilt at a position goes on as
    the first one would have.

        order = EpochOrder(num_rows=3, shuffle=True, seed=0)
        first = [next(order) for _ in range(5)]
        again = EpochOrder(num_rows=3, shuffle=True, seed=0, position=5)   # goes on where `order` is
    """

    def __init__(
        self, num_rows: int, shuffle: bool, seed: int, position: int = 0, stream: tuple[int, ...] = ()
    ) -> None:
        """Start at a position.

        Args:
            num_rows: rows of the file.
            shuffle: a permutation of its own for each epoch; False draws the rows as they stand.
            seed: of the permutations; at least 0.
            position: how many rows were drawn before.
            stream: more numbers for the permutations, where several orders have one seed.
        Raises:
            ValueError: a number is out of range.
        """
        if num_rows < 1 or seed < 0 or position < 0:
            raise ValueError(f"num_rows={num_rows} must be at least 1, seed={seed} and position={position} at least 0")
        self._num_rows = num_rows
        self._shuffle = shuffle
        self._key = (seed, *stream)
        self._position = position
        self._epoch = -1
        self._rows: npt.NDArray[np.int64] = np.arange(num_rows)

    @property
    def position(self) -> int:
        """How many rows have been drawn so far, over all epochs."""
        return self._position

    def __iter__(self) -> EpochOrder:
        """Return itself."""
        return self

    def __next__(self) -> int:
        """Draw the next row index; never ends."""
        epoch, place = divmod(self._position, self._num_rows)
        if self._shuffle and epoch != self._epoch:
            self._rows = self._permutation(epoch)
            self._epoch = epoch
        self._position += 1
        return int(self._rows[place])

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # Sorting raw bits, not Generator.permutation: NumPy promises the stream of a bit generator for all versions to
        # come, but not that of a Generator's methods, and a resumed job must see the same order.
        bits = np.random.Philox(np.random.SeedSequence((*self._key, epoch)))
        return np.argsort(bits.random_raw(self._num_rows), kind="stable")


class MixedOrder:
    """Row indices of several files without end, each file as often as its weight says.

    The files take turns so that after any number of draws each has had its share to within one draw. Each file is drawn
    as `EpochOrder` does, with an order of its own; its rows are counted behind those of the files before it.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], shuffle: bool, seed: int) -> None:
        """Start at the first draw.

        Args:
            sizes: rows of each file.
            weights: of each file, above zero.
            shuffle: see `EpochOrder`.
            seed: see `EpochOrder`.
        """
        self.position = 0
        """How many rows have been drawn so far."""
        starts: list[int] = np.cumsum([0, *sizes[:-1]]).tolist()
        self._weights = weights
        self._files = [
            (start, EpochOrder(size, shuffle, seed, stream=(index,)))
            for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        # A file's draw number k is due at (k + 1/2) / weight; the file whose next draw is due first is drawn.
        self._due = [(0.5 / weight, index) for index, weight in enumerate(weights)]
        heapq.heapify(self._due)

    def __iter__(self) -> MixedOrder:
        """Return itself."""
        return self

    def __next__(self) -> int:
        """Draw the next row index; never ends."""
        index = self._due[0][1]
        start, order = self._files[index]
        row = start + next(order)
        heapq.heapreplace(self._due, ((order.position + 0.5) / self._weights[index], index))
        self.position += 1
        return row


@dataclass(frozen=True, slots=True)
class Mix:
    """How the rows of a job's files are drawn."""

    sizes: tuple[int, ...]
    """Rows of each file."""
    weights: tuple[float, ...] | None = None
    """None draws all rows alike."""

    def order(self, shuffle: bool, seed: int) -> EpochOrder | MixedOrder:
        """Return the order from the first draw on."""
        if self.weights is None:
            return EpochOrder(sum(self.sizes), shuffle, seed)
        return MixedOrder(self.sizes, self.weights, shuffle, seed)

    @property
    def epoch(self) -> int:
        """Draws of an epoch: as many as it takes to draw every row of every file; with weights, some more than once."""
        if self.weights is None:
            return sum(self.sizes)
        total = sum(self.weights)
        return max(math.ceil(size * total / weight) for size, weight in zip(self.sizes, self.weights, strict=True))
