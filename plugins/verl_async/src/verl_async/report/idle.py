"""How much of an actor's time was spent waiting."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from verl_async.asynchrony.timeline import WAITS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from verl_async.asynchrony.timeline import Span


def idle_ratio(spans: Iterable[Span], role: str) -> float | None:
    """Share of wall time, from an actor's first span to its last, in which no busy span was open.

    Activities may overlap (scoring while generating), so their union counts, not their sum.

    Args:
        spans: of all actors.
        role: ``trainer`` or ``rollouter``; the mean is taken over ``rollouter-0``, ``rollouter-1``, ….

    Returns:
        A number from 0 to 1, or None if the role has no recorded time.
    """
    actors: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if span.who == role or span.who.startswith(f"{role}-"):
            actors[span.who].append(span)
    ratios = [ratio for ratio in map(_idle_ratio_of_one, actors.values()) if ratio is not None]
    return sum(ratios) / len(ratios) if ratios else None


def _idle_ratio_of_one(spans: Sequence[Span]) -> float | None:
    start_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
    if end_s <= start_s:
        return None
    busy_s, reached_s = 0.0, start_s
    for span in sorted((span for span in spans if span.what not in WAITS), key=lambda span: span.start_s):
        busy_s += max(0.0, span.end_s - max(span.start_s, reached_s))
        reached_s = max(reached_s, span.end_s)
    return 1.0 - busy_s / (end_s - start_s)
