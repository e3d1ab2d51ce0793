"""In which order the rows of a file are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class EpochOrder:
    """Row indices without end, epoch after epoch; each epoch visits every row once.

    An epoch's order depends on ``seed`` and the epoch's number only, so that an order rebuilt at a position goes on as
    the first one would have.

        order = EpochOrder(num_rows=3, shuffle=True, seed=0)
        first = [next(order) for _ in range(5)]
        again = EpochOrder(num_rows=3, shuffle=True, seed=0, position=5)   # goes on where `order` is
    """

    def __init__(self, num_rows: int, shuffle: bool, seed: int, position: int = 0) -> None:
        """Start at a position.

        Args:
            num_rows: rows of the file.
            shuffle: a permutation of its own for each epoch; False draws the rows as they stand.
            seed: of the permutations; at least 0.
            position: how many rows were drawn before.
        Raises:
            ValueError: a number is out of range.
        """
        if num_rows < 1 or seed < 0 or position < 0:
            raise ValueError(f"num_rows={num_rows} must be at least 1, seed={seed} and position={position} at least 0")
        self._num_rows = num_rows
        self._shuffle = shuffle
        self._seed = seed
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
        bits = np.random.Philox(np.random.SeedSequence((self._seed, epoch)))
        return np.argsort(bits.random_raw(self._num_rows), kind="stable")
