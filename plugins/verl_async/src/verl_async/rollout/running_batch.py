"""The samples that are generated together: who joins, one token for each, who leaves."""

from __future__ import annotations

import math
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from verl_async.rollout.parked import ParkedContexts
from verl_async.rollout.sampling import RowSampling, draw_tokens
from verl_async.rollout.slot_model import SlotModel
from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from verl_async.rollout.parked import Prefix
    from verl_async.rollout.reading import Reader
    from verl_async.rollout.row import Row

_JOIN_SHARE: Final = 16
"""Rows join once this part of the room, one in so many, is free: each join costs a forward of its own."""
_SPARE_TOKENS: Final = 16
"""That every row must have left when others join, so that they need not leave at once."""

Group = list["Row"]
"""Rows of one request that still share their context; they join together, so that it is read once."""


class RunningBatch:
    """Runs in one thread, under torch.inference_mode. Nothing of it waits."""

    def __init__(self, reader: Reader, max_running: int, max_cache_tokens: int, *, mixed_lengths: bool) -> None:
        self.reader = reader
        self.max_running = max_running
        self.rows: list[Row] = []
        self.waiting: deque[Group] = deque()
        self.parked = ParkedContexts()
        self.num_drawn = 0
        self._max_tokens = max_cache_tokens
        self._mixed_lengths = mixed_lengths
        self._logits_BV: torch.Tensor
        self._sampling: RowSampling

    @property
    def num_cache_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return sum(self.reader.lengths) + self.parked.num_tokens

    def add(self, rows: Group) -> None:
        """Have rows of one request wait for their turn; a group larger than the room is divided."""
        for start in range(0, len(rows), self.max_running):
            part = rows[start : start + self.max_running]
            by_length: dict[int, Group] = {}
            for row in part:
                by_length.setdefault(row.num_tokens, []).append(row)
            self.waiting.extend(by_length.values())

    def take_turn(self, version: int) -> list[Row]:
        """Let rows join, draw a token for each row, read it, and return the rows that ended.

        Raises:
            ModelError: the model's log-probabilities are not finite.
        """
        joining = self._choose()
        if joining:
            self._join(joining)
        if not self.rows:
            return []
        token_B, ended = self._draw(version)
        rows = [self.rows[place] for place in ended]
        for place, row in zip(ended, rows, strict=True):
            self._park(place, row)
        kept = _filled_up(len(self.rows), [*ended, *self._too_many(ended)])
        if len(kept) < len(self.rows):
            self._keep(kept)
            token_B = token_B[kept]
        if self.rows:
            self._logits_BV = self.reader.step(token_B)
            self._note_routes(self.rows)
        return rows

    def _choose(self) -> list[Row]:
        """Take from those that wait who joins now, in order."""
        if not self.waiting or (self.rows and not self.reader.can_join):
            return []
        longest = max(self.reader.lengths, default=0)
        chosen: list[Group] = []
        num_rows = len(self.rows)
        for group in self.waiting:
            length = group[0].num_tokens
            if not self._mixed_lengths and chosen and length != chosen[0][0].num_tokens:
                continue
            longest = max(longest, length)
            is_full = num_rows + len(group) > self.max_running
            is_long = (num_rows + len(group)) * (longest + _SPARE_TOKENS) > self._max_tokens
            if is_full or (is_long and num_rows > 0):
                break
            if is_long:  # alone, and still too many: as many as there is room for
                num_fitting = max(1, self._max_tokens // (longest + _SPARE_TOKENS))
                self.waiting.popleft()
                if rest := group[num_fitting:]:
                    self.waiting.appendleft(rest)
                return group[:num_fitting]
            chosen.append(group)
            num_rows += len(group)
        num_joining = num_rows - len(self.rows)
        if num_joining * _JOIN_SHARE < len(self.rows) and len(chosen) < len(self.waiting):
            return []
        self.waiting = deque(group for group in self.waiting if group not in chosen)
        return list(chain.from_iterable(chosen))

    def _join(self, joining: list[Row]) -> None:
        """Read what the rows have, and get the logits after it."""
        contexts = [row.context for row in joining]
        if isinstance(self.reader, SlotModel):
            taken: dict[tuple[int, ...], Prefix | None] = {}
            experts_from = _experts_from(joining, contexts)
            for row, context in zip(joining, contexts, strict=True):
                if context not in taken:
                    taken[context] = self.parked.take(row.request.affinity_key, context, experts_from.get(context))
                prefix = taken[context]
                if row.routes is not None and prefix is not None and prefix.experts is not None:
                    row.routes.add(prefix.experts, prefix.num_tokens)
            longest = max([*self.reader.lengths, *map(len, contexts)])
            self.parked.shrink(self._max_tokens - longest * (len(self.rows) + len(joining)))
            logits = self.reader.join(contexts, taken)
        else:
            logits = self.reader.join(contexts)
        self._note_routes(joining)
        self._logits_BV = torch.cat([self._logits_BV, logits]) if self.rows else logits
        self.rows += joining
        self._sampling = self._settings()

    def _note_routes(self, read: list[Row]) -> None:
        """Give rows the experts of what was read of them just now."""
        for row, experts in zip(read, self.reader.routes, strict=False):
            if row.routes is not None:
                row.routes.add(experts, row.num_tokens)

    def _settings(self) -> RowSampling:
        return RowSampling.of([row.request.sampling for row in self.rows], self._logits_BV.device)

    def _draw(self, version: int) -> tuple[torch.Tensor, list[int]]:
        """Draw a token for each row; returns [B] tokens, and the places of the rows that end with theirs."""
        uniform_B = torch.tensor([row.next_uniform() for row in self.rows], dtype=torch.float64)
        token_B, log_prob_B = draw_tokens(self._logits_BV, self._sampling, uniform_B.to(self._logits_BV.device))
        log_probs = log_prob_B.tolist()
        if not math.isfinite(sum(log_probs)):
            raise ModelError(
                f"the rollout model's log-probabilities are not finite under weights of version {version}; "
                "training has diverged, or rollout.dtype is too narrow for this model"
            )
        self.num_drawn += len(log_probs)
        drawn = zip(self.rows, token_B.tolist(), log_probs, strict=True)
        ended = [place for place, (row, token, log_prob) in enumerate(drawn) if row.append(token, log_prob, version)]
        return token_B, ended

    def _park(self, place: int, row: Row) -> None:
        """Keep what was read of a conversation; its last token was not."""
        if row.request.affinity_key and isinstance(self.reader, SlotModel):
            num_tokens = self.reader.lengths[place]
            layers = self.reader.park(place, num_tokens)
            experts = None if row.routes is None else row.routes.array()
            self.parked.add(row.request.affinity_key, row.context[:num_tokens], layers, experts)

    def _too_many(self, ended: list[int]) -> list[int]:
        """Have rows wait again for which the next token would have no room, and drop what is kept; returns places."""
        left = [place for place in range(len(self.rows)) if place not in ended]
        if not left:
            return []
        longest = max(self.reader.lengths) + 1
        num_rows = max(1, min(len(left), self._max_tokens // longest))
        self.parked.shrink(self._max_tokens - num_rows * longest)
        self.waiting.extendleft([self.rows[place]] for place in reversed(left[num_rows:]))
        return left[num_rows:]

    def _keep(self, kept: list[int]) -> None:
        self.rows = [self.rows[place] for place in kept]
        self.reader.select(kept)
        if self.rows:
            self._sampling = self._settings()

    def put_back(self) -> None:
        """Have all running rows wait again, first in line, as what they hold was read under other weights.

        The experts of their tokens stay, but for the last one's: the token behind it is drawn by the new weights.
        """
        for row in chain(self.rows, *self.waiting):
            if row.routes is not None:
                row.routes.cut(row.num_tokens - 1)
        self.waiting.extendleft([row] for row in reversed(self.rows))
        self.rows = []
        self.reader.select([])
        self.parked.shrink(0)

    def clear(self) -> list[Row]:
        """Take out all rows, running and waiting."""
        rows = [*self.rows, *chain.from_iterable(self.waiting)]
        self.rows = []
        self.waiting.clear()
        self.reader.select([])
        return rows


def _experts_from(rows: list[Row], contexts: list[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Say from which token of each context on some row has yet to learn the experts."""
    found: dict[tuple[int, ...], int] = {}
    for row, context in zip(rows, contexts, strict=True):
        if row.routes is not None:
            found[context] = min(row.routes.end, found.get(context, len(context)))
    return found


def _filled_up(num_rows: int, gone: list[int]) -> list[int]:
    """List the places of the rows that stay: what is at the end goes into the gaps, all else keeps its place."""
    out = set(gone)
    num_kept = num_rows - len(out)
    movers = iter([place for place in range(num_kept, num_rows) if place not in out])
    return [next(movers) if place in out else place for place in range(num_kept)]
