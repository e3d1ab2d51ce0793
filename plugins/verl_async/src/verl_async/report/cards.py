"""The headline figures of the report, worded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_async.report.progress_state import duration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.report.record import RunRecord


@dataclass(frozen=True, slots=True)
class Card:
    """One figure with its name; `note` says what it is measured on."""

    label: str
    value: str
    note: str = ""


def build_cards(summary: Mapping[str, Any], record: RunRecord) -> list[Card]:
    """Word the figures of a summary; those that the run does not have are left out."""
    measured = "first and last evaluation" if record.evaluations else "first and last 10 steps"
    skipped = f"{summary['num_steps_skipped']} skipped" if summary["num_steps_skipped"] else ""
    planned = (
        f"of {summary['num_steps_planned']:,} planned" if summary["num_steps"] != summary["num_steps_planned"] else ""
    )
    cards = [
        _change("Exact match", summary["exact_match_first"], summary["exact_match_last"], measured),
        _change("Reward", summary["reward_first"], summary["reward_last"], measured),
        Card("Time", duration(summary["seconds"]), "h:mm:ss"),
        Card("Training steps", f"{summary['num_steps']:,}", ", ".join(filter(None, (planned, skipped)))),
        Card("Prompts trained on", f"{summary['num_prompts']:,}"),
        _count("Stale samples", summary["stale_samples"], "prompts answered with older weights"),
        _count("Weight versions", summary["weight_versions"], "sent to the rollouters"),
        _throughput(record),
        _share("Trainer idle", summary["trainer_idle_ratio"]),
        # A supervised job has rollouters for its evaluations only: they are idle by design.
        None if summary["stale_samples"] is None else _share("Rollouters idle", summary["rollouter_idle_ratio"]),
    ]
    return [card for card in cards if card is not None]


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
