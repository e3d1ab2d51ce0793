"""What was read of conversations whose next turn may come: kept within a budget, the oldest are dropped first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Layers = list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, [heads, tokens, head dim]."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The keys and values of a context's beginning."""

    num_tokens: int
    parked: Layers


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    token_ids: tuple[int, ...]
    layers: Layers


class ParkedContexts:
    """Contexts by affinity key; several may have the same."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.num_tokens = 0

    def add(self, key: str, token_ids: tuple[int, ...], layers: Layers) -> None:
        """Keep a context."""
        self._entries.append(_Entry(key, token_ids, layers))
        self.num_tokens += len(token_ids)

    def take(self, key: str, context: tuple[int, ...]) -> Prefix | None:
        """Take out what is kept under a key that has most in common with a context; at least its last token is new."""
        best, length = None, 0
        for entry in self._entries:
            if key and entry.key == key:
                common = _num_common(entry.token_ids, context[:-1])
                if common > length:
                    best, length = entry, common
        if best is None:
            return None
        self._drop(best)
        return Prefix(length, best.layers)

    def shrink(self, max_tokens: int) -> None:
        """Drop the oldest until no more tokens are held."""
        while self._entries and self.num_tokens > max_tokens:
            self._drop(self._entries[0])

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.num_tokens -= len(entry.token_ids)


def _num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Length of the longest common beginning."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(place for place in range(length) if first[place] != second[place])
