"""When each actor was doing what: the source of the idle ratios and of the report's timeline."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

WAITS: Final = frozenset({"wait for samples", "wait for trainer"})
"""Activities that count as idle; all others are busy."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of one actor's time."""

    who: str
    """``trainer``, ``rollouter-0``, …"""
    what: str
    start_s: float
    """Since the start of the timeline."""
    end_s: float


@dataclass(slots=True)
class Timeline:
    """All spans of a job, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)
    _start_s: float = field(default_factory=time.monotonic)
    _recorded_s: dict[str, float] = field(default_factory=dict)
    _idle_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def span(self, who: str, what: str) -> Iterator[None]:
        """Record the time spent inside, also when it ends by an exception."""
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.spans.append(Span(who, what, start - self._start_s, end - self._start_s))
            role = who.split("-", 1)[0]
            self._recorded_s[role] = self._recorded_s.get(role, 0.0) + end - start
            self._idle_s[role] = self._idle_s.get(role, 0.0) + (end - start if what in WAITS else 0.0)

    def idle_ratio(self, role: str) -> float:
        """Share of the recorded time that a role (``trainer``, or all of ``rollouter``) spent waiting; 0 if none is."""
        recorded = self._recorded_s.get(role, 0.0)
        return self._idle_s[role] / recorded if recorded else 0.0
