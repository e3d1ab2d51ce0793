"""Charts of metrics over training steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np

from verl_async.report.chart_specs import CHARTS, Chart, LegendEntry, Line, evaluation_chart
from verl_async.report.chart_style import PLACEHOLDER, figure, inline_svg

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt
    from matplotlib.axes import Axes

    from verl_async.report.chart_specs import ChartSpec
    from verl_async.report.record import Recorded, RunRecord

    Array = npt.NDArray[np.float64]

_MAX_POINTS: Final = 400
_SMOOTHED_FROM: Final = 40
"""Steps from which a running mean is drawn over the noisy curve."""
_WIDTH_PX: Final = 360
_HEIGHT_PX: Final = 215
"""About the size on the page, on a desk and on a phone, so that text keeps its size."""


def metric_charts(record: RunRecord) -> list[Chart]:
    """Draw every chart that has something to show; those of metrics that the job never reported are left out."""
    evaluated = [evaluation_chart(name, metrics) for name, metrics in record.sets.items()]
    return [chart for spec in (*evaluated, *CHARTS) if (chart := _draw(spec, record)) is not None]


def _draw(spec: ChartSpec, record: RunRecord) -> Chart | None:
    lines = _distinct(record.steps, spec.lines)
    evaluated = _distinct(record.evaluations, spec.evaluated)
    if not lines and not evaluated:
        return None
    window = max(2, len(record.steps) // 25) if spec.smooth and len(record.steps) >= _SMOOTHED_FROM else 1
    with figure(_WIDTH_PX, _HEIGHT_PX) as drawn:
        axes = drawn.subplots()
        for line in lines:
            _plot_line(axes, line, *_series(record.steps, line.metric), window)
        for line in evaluated:
            steps, values = _series(record.evaluations, line.metric)
            axes.plot(steps, values, "o-", color=PLACEHOLDER[line.colour], markersize=6, clip_on=False, zorder=5)
        last_step = max(entry.step for entry in (*record.steps, *record.evaluations))
        axes.set_xlim(0, max(last_step, 1))
        _label(axes, spec)
        svg = inline_svg(drawn, spec.name, f"{spec.title} over training steps")
    smoothing = f"Bold: running mean over {window} steps." if window > 1 and lines else ""
    return Chart(
        spec.title, spec.unit, " ".join(filter(None, (spec.caption, smoothing))), svg, _legend(spec, lines, evaluated)
    )


def _legend(spec: ChartSpec, lines: Sequence[Line], evaluated: Sequence[Line]) -> tuple[LegendEntry, ...]:
    if len(spec.lines) + len(spec.evaluated) == 1:
        return ()
    curves = (LegendEntry(line.label, line.colour, "line") for line in lines)
    return (*curves, *(LegendEntry(line.label, line.colour, "dot") for line in evaluated))


def _distinct(entries: Sequence[Recorded], lines: Iterable[Line]) -> list[Line]:
    """Lines that have values; those with the very same values (the reward often is the exact match) become one."""
    kept: list[Line] = []
    for line in lines:
        values = _series(entries, line.metric)[1]
        if not np.isfinite(values).any():
            continue
        same = next((k for k in kept if np.array_equal(values, _series(entries, k.metric)[1], equal_nan=True)), None)
        if same is None:
            kept.append(line)
        else:
            kept[kept.index(same)] = Line(same.metric, f"{same.label} = {line.label}", same.colour)
    return kept


def _plot_line(axes: Axes, line: Line, steps: Array, values: Array, window: int) -> None:
    colour = PLACEHOLDER[line.colour]
    smoothed = window > 1
    x, low, mean, high = _thinned(steps, values)
    if len(x) < len(steps):
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    marker = "o" if len(x) == 1 else ""
    axes.plot(
        x,
        mean,
        color=colour,
        marker=marker,
        clip_on=not marker,
        alpha=0.3 if smoothed else 1.0,
        linewidth=0.9 if smoothed else 1.8,
    )
    if smoothed:
        x, _, mean, _ = _thinned(steps, _running_mean(values, window))
        axes.plot(x, mean, color=colour)


def _label(axes: Axes, spec: ChartSpec) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.grid(visible=False, axis="x")
    if spec.from_zero:
        axes.set_ylim(bottom=0)
    if spec.number == "percent":
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    elif spec.number == "large":
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    elif spec.number == "small":
        axes.ticklabel_format(axis="y", scilimits=(-2, 4))


def _series(entries: Sequence[Recorded], metric: str) -> tuple[Array, Array]:
    """Return steps and values, both [N]; a value that is missing or not finite is NaN, which leaves a gap."""
    steps = np.array([entry.step for entry in entries], dtype=np.float64)
    values = np.array([entry.metrics.get(metric, math.nan) for entry in entries], dtype=np.float64)
    return steps, np.where(np.isfinite(values), values, np.nan)


def _thinned(steps: Array, values: Array) -> tuple[Array, Array, Array, Array]:
    """Step, least, mean and greatest value of at most 400 stretches, so that the file stays small for any run."""
    if len(steps) <= _MAX_POINTS:
        return steps, values, values, values
    rows = []
    for part in np.array_split(np.arange(len(steps)), _MAX_POINTS):
        finite = values[part][np.isfinite(values[part])]
        bounds = (finite.min(), finite.mean(), finite.max()) if len(finite) else (np.nan,) * 3
        rows.append((steps[part].mean(), *bounds))
    x, low, mean, high = np.array(rows, dtype=np.float64).T
    return x, low, mean, high


def _running_mean(values: Array, window: int) -> Array:
    """Mean of the finite values among each value and the `window` - 1 before it."""
    finite = np.isfinite(values)
    sums = np.cumsum(np.where(finite, values, 0.0))
    counts = np.cumsum(finite)
    sums[window:] -= sums[:-window].copy()
    counts[window:] -= counts[:-window].copy()
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
