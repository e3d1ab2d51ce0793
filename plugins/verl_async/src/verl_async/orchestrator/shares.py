"""Which trainer rank computes which share of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Shares:
    """Ranks that split the model, or the sequences, compute one share together: each gets all of it."""

    of_ranks: tuple[int, ...]
    """For each rank its share, counted from 0; see `EngineConfig.data_parallel_ranks`."""

    @property
    def count(self) -> int:
        """How many shares there are."""
        return len(set(self.of_ranks))

    def to_ranks(self, by_share: Sequence[Item]) -> list[Item]:
        """Give each rank what belongs to its share."""
        assert len(by_share) == self.count
        return [by_share[share] for share in self.of_ranks]

    def from_ranks(self, by_rank: Sequence[Item]) -> list[Item]:
        """Take each share's result from the first of its ranks: the others have the same."""
        return [by_rank[self.of_ranks.index(share)] for share in range(self.count)]
