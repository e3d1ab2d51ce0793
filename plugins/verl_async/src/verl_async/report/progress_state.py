"""What both kinds of progress display know, and how they word it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from verl_async.report.record import evaluated_sets

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_BARS: Final = "▁▂▃▄▅▆▇█"
_TREND_STEPS: Final = 400
_PACE_STEPS: Final = 50
"""The time left is judged by the pace of the last so many steps: the first ones warm up."""


@dataclass(slots=True)
class ProgressState:
    """The latest metrics of a job."""

    clock: Callable[[], float] = time.monotonic
    status: str = ""
    step: int = 0
    num_steps: int = 0
    """0 until the first step is finished."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    evaluation_step: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=_TREND_STEPS))
    start_s: float = 0.0
    _step_times: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PACE_STEPS))

    def __post_init__(self) -> None:
        """Start the clock."""
        self.start_s = self.clock()

    def take_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step."""
        self.step, self.num_steps, self.metrics = step, num_steps, dict(metrics)
        self._step_times.append((step, self.clock()))
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])

    def take_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation."""
        self.evaluation_step, self.evaluation = step, dict(metrics)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.start_s

    @property
    def left_s(self) -> float | None:
        """Seconds left at the recent pace, or None before two steps are finished."""
        if len(self._step_times) < 2:  # noqa: PLR2004 - a pace needs two times
            return None
        (first, first_s), (last, last_s) = self._step_times[0], self._step_times[-1]
        pace_s = (last_s - first_s) / (last - first)
        return max(0.0, (self.num_steps - last) * pace_s - (self.clock() - last_s))

    def shown(self) -> Iterable[tuple[str, str]]:
        """Label and text of each metric that the job reports: an SFT job has no rollouts, so no staleness."""
        metrics = self.metrics
        for name, label in (("reward", "reward"), ("exact_match", "exact match")):
            if name in metrics:
                yield label, f"{metrics[name]:.3f}"
        if "staleness_mean" in metrics:
            yield "staleness", f"{metrics['staleness_mean']:.2f} (max {metrics.get('staleness_max', 0):.0f})"
        if "response_tokens" in metrics:
            yield "response", f"{metrics['response_tokens']:,.1f} tokens"
        if "tokens_per_s" in metrics:
            yield "speed", f"{metrics['tokens_per_s']:,.0f} tokens/s"
        for name, label in (("trainer/idle_ratio", "trainer idle"), ("rollouter/idle_ratio", "rollouter idle")):
            if name in metrics:
                yield label, f"{metrics[name]:.0%}"
        if "loss" in metrics:
            yield "loss", f"{metrics['loss']:.4g}"
        if "grad_norm" in metrics:
            skipped = "" if metrics.get("step_applied", 1) else " (step skipped)"
            yield "grad norm", f"{metrics['grad_norm']:.3g}{skipped}"

    def evaluation_text(self) -> str:
        """The last evaluation in a few words."""
        texts = []
        for name, metrics in evaluated_sets(self.evaluation).items():
            tries = [metric for metric in metrics if metric.startswith("pass@")][-1:]  # with the most
            labels = {"exact_match": "exact match", "reward": "reward"} | {metric: metric for metric in tries}
            parts = (f"{label} {metrics[metric]:.3f}" for metric, label in labels.items() if metric in metrics)
            texts.append(f"{name}: {', '.join(parts)}")
        return f"{'; '.join(texts)} (after step {self.evaluation_step})"


def duration(seconds: float) -> str:
    """Word a time span, as in ``1:02:03``."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def sparkline(values: Iterable[float], width: int) -> str:
    """Draw a small curve of at most `width` characters; each is the mean of a stretch of the finite values."""
    finite = [value for value in values if abs(value) < float("inf")]  # NaN compares false, so it goes as well
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    edges = [len(finite) * column // columns for column in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)
