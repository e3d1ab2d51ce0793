"""The headline metrics of the report, worded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_async.report.progress_state import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from verl_async.report.record import RunRecord


@dataclass(frozen=True, slots=True)
class Card:
    """One metric with its name; `note` says what it is measured on."""

    label: str
    value: str
    note: str = ""


def build_cards(summary: Mapping[str, Any], record: RunRecord) -> list[Card]:
    """Word the metrics of a summary; those that the run does not have are left out."""
    skipped = f"{summary['num_steps_skipped']} skipped" if summary["num_steps_skipped"] else ""
    planned = (
        f"of {summary['num_steps_planned']:,} planned" if summary["num_steps"] != summary["num_steps_planned"] else ""
    )
    cards = [
        *_changes(summary),
        Card("Time", duration(summary["seconds"]), "h:mm:ss"),
        Card("Training steps", f"{summary['num_steps']:,}", ", ".join(filter(None, (planned, skipped)))),
        Card("Prompts trained on", f"{summary['num_prompts']:,}"),
        _count("Stale samples", summary["stale_samples"], "prompts answered with older weights"),
        _count("Weight versions", summary["weight_versions"], "sent to the rollouters"),
        _throughput(record),
        _share("Trainer idle", summary["trainer_idle_ratio"]),
        Card("Waited for evaluation", f"{summary['evaluation_wait_s']:,.1f} s", "by the trainer")
        if record.evaluations
        else None,
        # A supervised job has rollouters for its evaluations only: they are idle by design.
        None if summary["stale_samples"] is None else _share("Rollouters idle", summary["rollouter_idle_ratio"]),
    ]
    return [card for card in cards if card is not None]


def _changes(summary: Mapping[str, Any]) -> Iterator[Card | None]:
    """Word what was learned: on each evaluation set, with the pass@k of the most tries; else in training."""
    for name, metrics in summary["evaluations"].items():
        tries = [metric for metric in metrics if metric.startswith("pass@")][-1:]
        for metric, label in [("exact_match", "Exact match"), ("reward", "Reward"), *((one, one) for one in tries)]:
            first, last = metrics.get(metric, (None, None))
            yield _change(f"{label}, {name}", first, last, "first and last evaluation")
    if not summary["evaluations"]:
        for metric, label in (("exact_match", "Exact match"), ("reward", "Reward")):
            yield _change(label, summary[f"{metric}_first"], summary[f"{metric}_last"], "first and last 10 steps")


def _change(label: str, first: float | None, last: float | None, note: str) -> Card | None:
    if first is not None and last is not None:
        return Card(label, f"{first:.3f} → {last:.3f}", note)
    if first is not None:
        return Card(label, f"{first:.3f}", "first evaluation; there is no second")
    return None


def _count(label: str, count: int | None, note: str) -> Card | None:
    return None if count is None else Card(label, f"{count:,}", note)


def _share(label: str, ratio: float | None) -> Card | None:
    return None if ratio is None else Card(label, f"{ratio:.0%}", "of wall time")


def _throughput(record: RunRecord) -> Card | None:
    speeds = [entry.metrics.get("tokens_per_s", math.nan) for entry in record.steps]
    finite = [speed for speed in speeds if math.isfinite(speed)]
    return Card("Throughput", f"{sum(finite) / len(finite):,.0f}", "trained tokens/s") if finite else None
