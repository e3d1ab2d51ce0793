"""Which charts the report has, and what a chart is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class LegendEntry:
    """What a colour stands for; the page draws the legend, so that it wraps on a phone."""

    label: str
    colour: str
    shape: Literal["line", "dot", "square"]


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its words."""

    title: str
    unit: str
    caption: str
    svg: str
    legend: tuple[LegendEntry, ...] = ()
    """Empty where one curve needs no name."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve."""

    metric: str
    label: str
    colour: str


@dataclass(frozen=True, slots=True)
class ChartSpec:
    """Which metrics go into one chart."""

    name: str
    title: str
    unit: str
    """Of the vertical axis; stands beside the title, where it takes no room from the curve."""
    lines: tuple[Line, ...]
    evaluated: tuple[Line, ...] = ()
    """Of the evaluations: few, so that each is a point."""
    number: Literal["plain", "percent", "large", "small"] = "plain"
    """How the vertical axis is numbered."""
    from_zero: bool = True
    smooth: bool = True
    caption: str = ""


def evaluation_chart(name: str, metrics: Iterable[str]) -> ChartSpec:
    """Return the chart of an evaluation set; of its pass@k, the one with the most tries."""
    tries = [metric for metric in metrics if metric.startswith("pass@")][-1:]
    lines = [("reward", "reward", "blue"), ("exact_match", "exact match", "orange")]
    lines += [(metric, metric, "green") for metric in tries]
    evaluated = tuple(Line(f"{name}/{metric}", label, colour) for metric, label, colour in lines)
    title = f"Evaluation on {name}"
    return ChartSpec(f"evaluation-{name}", title, "mean", (), evaluated, from_zero=False, smooth=False)


CHARTS: Final = (
    ChartSpec(
        "score",
        "Reward and exact match",
        "sample mean",
        lines=(Line("reward", "reward", "blue"), Line("exact_match", "exact match", "orange")),
        from_zero=False,
    ),
    ChartSpec("loss", "Loss", "mean over loss tokens", (Line("loss", "loss", "blue"),), from_zero=False),
    ChartSpec("grad_norm", "Gradient norm", "L2, before clipping", (Line("grad_norm", "gradient norm", "purple"),)),
    ChartSpec("length", "Response length", "tokens, mean", (Line("response_tokens", "response", "teal"),)),
    ChartSpec(
        "staleness",
        "Staleness",
        "weight versions",
        (Line("staleness_max", "max", "orange"), Line("staleness_mean", "mean", "blue")),
        caption="Weight versions made between drawing a sample and training on it.",
    ),
    ChartSpec(
        "learning_rate",
        "Learning rate",
        "of AdamW",
        (Line("learning_rate", "learning rate", "blue"),),
        number="small",
        smooth=False,
    ),
    ChartSpec(
        "throughput", "Throughput", "trained tokens/s", (Line("tokens_per_s", "tokens/s", "green"),), number="large"
    ),
    ChartSpec(
        "idle",
        "Idle time",
        "share of time",
        (Line("trainer/idle_ratio", "trainer", "blue"), Line("rollouter/idle_ratio", "rollouters", "orange")),
        number="percent",
    ),
    ChartSpec(
        "limits",
        "Clipped and cut off",
        "share",
        (Line("clip_fraction", "clipped tokens", "purple"), Line("truncated_ratio", "answers cut off", "teal")),
        number="percent",
    ),
)
