"""When each actor was doing what: the source of the idle ratios and of the report's timeline."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WAITS: Final = frozenset({"wait for samples", "wait for trainer"})
"""Activities that count as idle; all others are busy."""
_NEGLIGIBLE_S: Final = 0.001
"""Shorter waits are not recorded, and shorter gaps in an activity are closed: a job of a million samples would
otherwise have as many spans."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of one actor's time."""

    who: str
    """``trainer``, ``rollouter-0``, …"""
    what: str
    start_s: float
    """Since the start of the timeline."""
    end_s: float


class IdleRatios:
    """Share of wall time, from an actor's first span to its last, in which no busy span was open.

    Activities may overlap (scoring while evaluating), so their union counts, not their sum.
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        """Take spans in any order; those added later must come in the order in which they end."""
        self._actors: dict[str, _ActorTime] = {}
        for span in sorted(spans, key=lambda span: span.end_s):
            self.add(span)

    def add(self, span: Span) -> None:
        """Take a span that ends last of all so far."""
        if span.who not in self._actors:
            self._actors[span.who] = _ActorTime(span.start_s, span.end_s)
        self._actors[span.who].add(span)

    def of(self, role: str) -> float | None:
        """Return the ratio of a role, 0 to 1, or None if it has no recorded time.

        Args:
            role: ``trainer`` or ``rollouter``; the mean is taken over ``rollouter-0``, ``rollouter-1``, ….
        """
        actors = [actor for who, actor in self._actors.items() if who == role or who.startswith(f"{role}-")]
        ratios = [1 - actor.busy_s / (actor.end_s - actor.start_s) for actor in actors if actor.end_s > actor.start_s]
        return fmean(ratios) if ratios else None


@dataclass(slots=True)
class _ActorTime:
    """Busy time of one actor."""

    start_s: float
    end_s: float
    busy_s: float = 0.0
    _stretches: list[tuple[float, float]] = field(default_factory=list)
    """The union of the busy spans: apart from each other, in order."""

    def add(self, span: Span) -> None:
        self.start_s, self.end_s = min(self.start_s, span.start_s), max(self.end_s, span.end_s)
        if span.what in WAITS:
            return
        start_s, end_s = span.start_s, span.end_s
        while self._stretches and self._stretches[-1][1] >= start_s:
            earlier_start_s, earlier_end_s = self._stretches.pop()
            self.busy_s -= earlier_end_s - earlier_start_s
            start_s = min(start_s, earlier_start_s)
        self._stretches.append((start_s, end_s))
        self.busy_s += end_s - start_s


@dataclass(slots=True)
class Timeline:
    """All spans of a job."""

    spans: list[Span] = field(default_factory=list)
    _start_s: float = field(default_factory=time.monotonic)
    _latest: dict[tuple[str, str], int] = field(default_factory=dict)
    """Where each actor's latest span of each activity is."""
    _idle: IdleRatios = field(default_factory=IdleRatios)

    @property
    def now_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._start_s

    @contextmanager
    def span(self, who: str, what: str) -> Iterator[None]:
        """Record the time spent inside, also when it ends by an exception."""
        start_s = self.now_s
        try:
            yield
        finally:
            self.record(Span(who, what, start_s, self.now_s))

    def idle_ratio(self, role: str) -> float:
        """Return the `IdleRatios` of a role so far; 0 if nothing is recorded."""
        return self._idle.of(role) or 0.0

    def record(self, span: Span) -> None:
        """Take a span that ends now."""
        if span.what in WAITS and span.end_s - span.start_s < _NEGLIGIBLE_S:
            return
        place = self._latest.get((span.who, span.what))
        if place is not None and span.start_s - self.spans[place].end_s < _NEGLIGIBLE_S:
            span = Span(span.who, span.what, min(span.start_s, self.spans[place].start_s), span.end_s)
            self.spans[place] = span
        else:
            self._latest[span.who, span.what] = len(self.spans)
            self.spans.append(span)
        self._idle.add(span)


class Activity:
    """What one actor does, one thing after the other; recorded up to each change."""

    def __init__(self, timeline: Timeline, who: str, what: str) -> None:
        """Begin with `what`."""
        self._timeline = timeline
        self._who = who
        self._what = what
        self._since_s = timeline.now_s

    def is_now(self, what: str) -> None:
        """Note what it does from now on; the same again only records the time until now."""
        now_s = self._timeline.now_s
        if what == self._what and now_s - self._since_s < _NEGLIGIBLE_S:
            return  # the next change records it
        self._timeline.record(Span(self._who, self._what, self._since_s, now_s))
        self._what, self._since_s = what, now_s
