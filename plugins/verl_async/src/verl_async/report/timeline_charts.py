"""Charts of what the trainer and the rollouters did when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from verl_async.report.chart_specs import Chart, LegendEntry
from verl_async.report.chart_style import PLACEHOLDER, figure, inline_svg

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from matplotlib.axes import Axes

    from verl_async.orchestrator.timeline import Span

    Array = npt.NDArray[np.float64]

_OTHER: Final = "soft"
ACTIVITIES: Final = {
    "train": "blue",
    "sync weights": "orange",
    "generate": "green",
    "score": "teal",
    "evaluate": "purple",
    "wait for samples": "wait",
    "wait for trainer": "wait-2",
    "wait for evaluation": _OTHER,
}
"""Colour of each activity; where two overlap, the earlier in this list is on top."""
_MAX_ROWS: Final = 12
_MAX_SPANS: Final = 400
"""Bars in one picture: more would be thinner than a pixel."""
_ZOOM_S: Final = 30.0
_COLUMNS: Final = 160
_WIDTH_PX: Final = 900


def timeline_charts(spans: Sequence[Span]) -> list[Chart]:
    """Draw the whole run, and a stretch from its middle bar by bar where the whole is too long for that.

    Returns:
        No chart if no time was recorded, one for a short run, else two.
    """
    if not spans:
        return []
    start_s, end_s = min(span.start_s for span in spans), max(span.end_s for span in spans)
    if end_s <= start_s:
        return []
    actors = _actors(spans)
    rows = actors[:_MAX_ROWS]
    left_out = f" Not shown: {len(actors) - len(rows)} more actors." if len(actors) > len(rows) else ""
    shown = [span for span in spans if span.who in rows]
    if len(shown) <= _MAX_SPANS and end_s - start_s <= 2 * _ZOOM_S:
        charts = [_bars(shown, rows, start_s, end_s, start_s, "Timeline")]
    else:
        zoom_start_s, zoom_end_s = _stretch(shown, start_s, end_s)
        charts = [
            _shares(shown, rows, start_s, end_s),
            _bars(shown, rows, zoom_start_s, zoom_end_s, start_s, "Timeline, zoomed in"),
        ]
    return [replace(chart, caption=chart.caption + left_out) for chart in charts]


def timeline_legend(spans: Sequence[Span]) -> list[LegendEntry]:
    """What each colour of the timeline stands for."""
    return [LegendEntry(what, colour, "square") for what, colour in _activities_in(spans)]


def _activities_in(spans: Sequence[Span]) -> list[tuple[str, str]]:
    """Name and colour of every activity that occurs."""
    seen = {span.what for span in spans}
    known = [(what, colour) for what, colour in ACTIVITIES.items() if what in seen]
    return known + [(what, _OTHER) for what in sorted(seen - ACTIVITIES.keys())]


def _actors(spans: Sequence[Span]) -> list[str]:
    """Actors from top to bottom: the trainer, then rollouters by number."""

    def order(who: str) -> tuple[bool, str, int]:
        role, _, number = who.rpartition("-")
        return (who != "trainer", role or who, int(number) if number.isdecimal() else 0)

    return sorted({span.who for span in spans}, key=order)


def _stretch(spans: Sequence[Span], start_s: float, end_s: float) -> tuple[float, float]:
    """Some 30 seconds around the middle of the run, halved until its bars can be told apart."""
    middle_s, length_s = (start_s + end_s) / 2, min(_ZOOM_S, end_s - start_s)
    while True:
        first_s, last_s = middle_s - length_s / 2, middle_s + length_s / 2
        if sum(span.end_s > first_s and span.start_s < last_s for span in spans) <= _MAX_SPANS:
            return first_s, last_s
        length_s /= 2


def _bars(spans: Sequence[Span], rows: list[str], start_s: float, end_s: float, zero_s: float, title: str) -> Chart:
    """One bar for each span."""
    with figure(_WIDTH_PX, _height(rows)) as drawn:
        axes = drawn.subplots()
        for what, colour in reversed(_activities_in(spans)):
            for row, who in enumerate(rows):
                bars = [
                    (max(span.start_s, start_s) - zero_s, min(span.end_s, end_s) - max(span.start_s, start_s))
                    for span in spans
                    if span.who == who and span.what == what and span.end_s > start_s and span.start_s < end_s
                ]
                if bars:
                    axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=PLACEHOLDER[colour], linewidth=0)
        _label(axes, rows, start_s - zero_s, end_s - zero_s)
        svg = inline_svg(drawn, "bars", f"{title}: what each actor did when")
    return Chart(
        title, "one bar an activity", f"Seconds {start_s - zero_s:,.1f} to {end_s - zero_s:,.1f} of the run.", svg
    )


def _shares(spans: Sequence[Span], rows: list[str], start_s: float, end_s: float) -> Chart:
    """The whole run in columns: the height of a colour is the share of the column's time spent on it."""
    edges_s = np.linspace(start_s, end_s, _COLUMNS + 1)
    kinds = _activities_in(spans)
    by_activity: defaultdict[tuple[str, str], list[Span]] = defaultdict(list)
    for span in spans:
        by_activity[span.who, span.what].append(span)
    with figure(_WIDTH_PX, _height(rows)) as drawn:
        axes = drawn.subplots()
        for row, who in enumerate(rows):
            seconds = np.array([_seconds_in_columns(by_activity[who, what], edges_s) for what, _ in kinds])
            # Activities may overlap: then they share the column.
            shares = seconds / np.maximum(seconds.sum(axis=0), np.diff(edges_s))
            tops = row + 0.36 - 0.72 * np.cumsum(shares, axis=0)
            lower = np.full(_COLUMNS, row + 0.36)
            for upper, (_, colour) in zip(tops, kinds, strict=True):
                if (lower > upper).any():
                    x = np.repeat(edges_s - start_s, 2)[1:-1]
                    axes.fill_between(
                        x, np.repeat(lower, 2), np.repeat(upper, 2), color=PLACEHOLDER[colour], linewidth=0
                    )
                lower = upper
        _label(axes, rows, 0.0, end_s - start_s)
        svg = inline_svg(drawn, "shares", "Timeline of the whole run: share of time on each activity")
    width_s = (end_s - start_s) / _COLUMNS
    caption = f"The height of a colour is its share of the time, in columns of {width_s:,.1f} s."
    return Chart("Timeline, whole run", "share of time", caption, svg)


def _seconds_in_columns(spans: Sequence[Span], edges_s: Array) -> Array:
    """Seconds that `spans` cover in each column: the growth, from edge to edge, of the time covered before an edge."""
    covered_s = np.zeros_like(edges_s)
    for sign, times in ((1, [span.start_s for span in spans]), (-1, [span.end_s for span in spans])):
        ordered = np.sort(np.array(times))
        num_before = np.searchsorted(ordered, edges_s)
        covered_s += sign * (num_before * edges_s - np.concatenate(([0.0], np.cumsum(ordered)))[num_before])
    return np.diff(covered_s)


def _label(axes: Axes, rows: list[str], start_s: float, end_s: float) -> None:
    axes.set_xlim(start_s, end_s)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(axis="y", length=0, labelcolor=PLACEHOLDER["ink"])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("seconds since the first activity")


def _height(rows: list[str]) -> float:
    return 58 + 34 * len(rows)
