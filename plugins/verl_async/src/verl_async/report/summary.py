"""The headline metrics of a run."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final, Literal

from verl_async.config import TrainJob
from verl_async.orchestrator.timeline import IdleRatios
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.catalog import origin_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.config import SftJob
    from verl_async.orchestrator.timeline import Span
    from verl_async.report.record import Recorded, RunRecord

RunStatus = Literal["finished", "stopped early", "interrupted", "failed"]

_PACKAGES: Final = ("verl-engine-core", "verl-async", "torch", "transformers", "ray")
_WINDOW_STEPS: Final = 10
"""Without evaluations, the first and last metrics are means over so many training steps: one step is too noisy."""


def build_summary(
    job: TrainJob | SftJob, record: RunRecord, spans: Sequence[Span], *, status: RunStatus, seconds: float
) -> dict[str, object]:
    """Gather the content of ``summary.json``.

    Args:
        job: the resolved job.
        record: what the run reported.
        spans: what each actor did when.
        status: how the run ended.
        seconds: wall time of the whole run.

    Returns:
        Metrics by name, ready for JSON; None where the run has no such metric. ``exact_match_first`` and ``_last`` (and
        so the rewards) are of the first and last evaluation on the first set; without any, means over the first and
        last 10 training steps. ``evaluations`` holds first and last of each metric of each set.
    """
    sets = record.sets
    headline = next(iter(sets), "")
    prefix = f"{headline}/" if headline else ""
    exact_match_first, exact_match_last = _first_and_last(record, f"{prefix}exact_match")
    reward_first, reward_last = _first_and_last(record, f"{prefix}reward")
    idle = IdleRatios(spans)
    trainer_idle, rollouter_idle = idle.of("trainer"), idle.of("rollouter")
    return {
        "status": status,
        "backend": job.engine.backend,
        "backend_distribution": origin_of(BACKEND, job.engine.backend) or None,
        "exact_match_first": exact_match_first,
        "exact_match_last": exact_match_last,
        "reward_first": reward_first,
        "reward_last": reward_last,
        "measured_on": f"evaluation set {headline}" if headline else "training steps",
        "evaluations": {
            name: {metric: _first_and_last(record, f"{name}/{metric}") for metric in metrics}
            for name, metrics in sets.items()
        },
        "evaluation_wait_s": round(sum(entry.metrics.get("wait_s", 0.0) for entry in record.evaluations), 3),
        "seconds": round(seconds, 3),
        "num_steps": len(record.steps),
        "num_steps_planned": job.trainer.num_steps or record.num_steps,  # of epochs, known since the first step
        "num_steps_skipped": sum(not entry.metrics.get("step_applied", 1.0) for entry in record.steps),
        "num_prompts": len(record.steps) * _prompts_per_step(job),
        "stale_samples": _last_count(record, "fully_async/count/stale_samples_processed"),
        "weight_versions": _last_count(record, "weight_version"),
        "trainer_idle_ratio": None if trainer_idle is None else round(trainer_idle, 4),
        "rollouter_idle_ratio": None if rollouter_idle is None else round(rollouter_idle, 4),
        "warnings": record.warnings,
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def _prompts_per_step(job: TrainJob | SftJob) -> int:
    """Prompts, or supervised examples, that one training step takes up; stale samples are counted in prompts too."""
    if isinstance(job, TrainJob):
        return job.async_training.require_batches * job.trainer.mini_batch_size
    return job.trainer.batch_size


def _first_and_last(record: RunRecord, name: str) -> tuple[float | None, float | None]:
    if record.evaluations:
        # A run that ended before its second evaluation has no last value: the first one would pass for a result.
        return _mean(record.evaluations[:1], name), _mean(record.evaluations[1:][-1:], name)
    return _mean(record.steps[:_WINDOW_STEPS], name), _mean(record.steps[-_WINDOW_STEPS:], name)


def _mean(entries: Sequence[Recorded], name: str) -> float | None:
    values = [entry.metrics[name] for entry in entries if math.isfinite(entry.metrics.get(name, math.nan))]
    return round(sum(values) / len(values), 6) if values else None


def _last_count(record: RunRecord, name: str) -> int | None:
    """Last value of a metric that counts up over the run."""
    value = next((entry.metrics[name] for entry in reversed(record.steps) if name in entry.metrics), math.nan)
    return int(value) if math.isfinite(value) else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
