"""Which trainer ranks compute the same data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class DataParallelRanks:
    """Ranks that split the model, or the sequences, are one data-parallel rank together: each gets all of its data."""

    of_ranks: tuple[int, ...]
    """For each rank its data-parallel rank; see `EngineConfig.data_parallel_ranks`."""

    @property
    def count(self) -> int:
        """How many data-parallel ranks there are."""
        return len(set(self.of_ranks))

    def to_ranks(self, by_data_rank: Sequence[Item]) -> list[Item]:
        """Give each rank what belongs to its data-parallel rank."""
        assert len(by_data_rank) == self.count
        return [by_data_rank[index] for index in self.of_ranks]

    def from_ranks(self, by_rank: Sequence[Item]) -> list[Item]:
        """Take the result of each data-parallel rank from the first of its ranks: the others have the same."""
        return [by_rank[self.of_ranks.index(index)] for index in range(self.count)]
