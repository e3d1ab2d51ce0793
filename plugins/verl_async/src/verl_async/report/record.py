"""Everything a run reported, kept in memory for the summary and the report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Recorded:
    """The metrics of one step or evaluation."""

    step: int
    """Training steps finished by then."""
    time_s: float
    """Since the record was started."""
    metrics: Mapping[str, float]


def evaluated_sets(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Divide the metrics of an evaluation by its sets, with whose names they begin; in their order."""
    sets: dict[str, dict[str, float]] = {}
    for full_name, value in metrics.items():
        name, slash, metric = full_name.partition("/")
        if slash:
            sets.setdefault(name, {})[metric] = value
    return sets


@dataclass(slots=True)
class RunRecord:
    """A listener that remembers. Some 30 floats a step: a run of 100,000 steps takes about 200 MB."""

    steps: list[Recorded] = field(default_factory=list)
    evaluations: list[Recorded] = field(default_factory=list)
    num_steps: int = 0
    """Steps planned; 0 until the first one is finished."""
    warnings: list[str] = field(default_factory=list)
    _start_s: float = field(default_factory=time.monotonic)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the record was started."""
        return time.monotonic() - self._start_s

    def on_status(self, text: str) -> None:
        """Ignore what the job does now."""

    def on_note(self, text: str) -> None:
        """Keep a warning."""
        if text.startswith("warning: "):
            self.warnings.append(text.removeprefix("warning: "))

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of a step."""
        self.num_steps = num_steps
        self.steps.append(Recorded(step, self.elapsed_s, dict(metrics)))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of an evaluation."""
        self.evaluations.append(Recorded(step, self.elapsed_s, dict(metrics)))

    @property
    def sets(self) -> dict[str, dict[str, float]]:
        """The evaluation sets, each with the metrics of its first evaluation."""
        return evaluated_sets(self.evaluations[0].metrics) if self.evaluations else {}
