"""What was read of conversations whose next turn may come: kept within a budget, the oldest are dropped first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from verl_async.rollout.routes import Experts

    Layers = list[tuple[torch.Tensor, torch.Tensor]]
    """Keys and values of each layer, [heads, tokens, head dim]."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The keys and values of a context's beginning."""

    num_tokens: int
    parked: Layers
    experts: Experts | None = None
    """Of the tokens at its end, as far back as they are known."""


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    token_ids: tuple[int, ...]
    layers: Layers
    experts: Experts | None
    """Of the last tokens."""


class ParkedContexts:
    """Contexts by affinity key; several may have the same."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self.num_tokens = 0

    def add(self, key: str, token_ids: tuple[int, ...], layers: Layers, experts: Experts | None = None) -> None:
        """Keep a context, and the experts of its last tokens where they are known."""
        self._entries.append(_Entry(key, token_ids, layers, experts))
        self.num_tokens += len(token_ids)

    def take(self, key: str, context: tuple[int, ...], experts_from: int | None = None) -> Prefix | None:
        """Take out what is kept under a key that has most in common with a context; at least its last token is new.

        Where the experts are wanted of the tokens from an index on, it must be known of all of them.
        """
        best, length = None, 0
        for entry in self._entries:
            if key and entry.key == key:
                common = _num_common(entry.token_ids, context[:-1])
                first_known = len(entry.token_ids) - (0 if entry.experts is None else len(entry.experts))
                lacks_experts = experts_from is not None and experts_from < min(common, first_known)
                if common > length and not lacks_experts:
                    best, length = entry, common
        if best is None:
            return None
        self._drop(best)
        num_behind = len(best.token_ids) - length
        experts = None if best.experts is None else best.experts[: max(0, len(best.experts) - num_behind)]
        return Prefix(length, best.layers, experts)

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
