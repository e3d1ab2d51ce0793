"""What a job leaves behind when it has ended, however it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_async.job import resolved
from verl_async.report.metrics_log import rewrite_metrics
from verl_async.report.output_folder import OutputError
from verl_async.report.report import write_report
from verl_async.report.saying import describe, say, warn
from verl_async.report.summary import build_summary

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_async.config import SftJob, TrainJob
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.report.output_folder import OutputFolder
    from verl_async.report.record import RunRecord
    from verl_async.report.summary import RunStatus


@dataclass(slots=True)
class EndedJob:
    """A job that has ended, and what is known of it."""

    job: TrainJob | SftJob
    folder: OutputFolder
    record: RunRecord
    timeline: Timeline
    status: RunStatus
    failure: BaseException | None
    """What it is to end the command with."""


def leave_results(ended: EndedJob, *, rewrite_log: bool) -> None:
    """Write summary, timeline and report, and say where. What cannot be written fails a job that has not failed yet.

    Args:
        ended: the job.
        rewrite_log: whether ``metrics.jsonl`` is incomplete.
    """
    folder, record, spans = ended.folder, ended.record, ended.timeline.spans
    problems: list[str] = []
    _attempt(folder.claim_again, problems)
    if folder.was_deleted:
        problems.append(f"{folder.path} was deleted while the job ran, and was made again")
        _attempt(lambda: folder.write_config(resolved(ended.job)), problems)
    if rewrite_log or folder.was_deleted:
        problems.append(f"{folder.metrics.name} could not be written while the job ran")
        _attempt(lambda: rewrite_metrics(folder, record), problems)
    _fail(ended, problems)
    summary = build_summary(ended.job, record, spans, status=ended.status, seconds=record.elapsed_s)
    failure = ended.failure
    if failure is not None and ended.status == "failed":
        summary["error"] = describe(failure)
        _attempt(lambda: folder.write_error_log(failure), problems)
    _attempt(lambda: folder.write_summary(summary), problems)
    _attempt(lambda: folder.write_timeline(spans), problems)
    _attempt(lambda: write_report(folder, ended.job, record, spans, summary), problems)
    if failure is None:
        _fail(ended, problems)
    elif problems:
        warn(f"not all results could be written: {'; '.join(problems)}")
    _say_where(folder, summary)


def _attempt(write: Callable[[], object], problems: list[str]) -> None:
    """Write one result; what is wrong with it keeps no other from being written."""
    try:
        write()
    except Exception as error:  # noqa: BLE001 - a number that JSON cannot hold, a chart that cannot be drawn
        problems.append(describe(error))


def _fail(ended: EndedJob, problems: list[str]) -> None:
    """Take a job for failed that trained to its end, but did not leave all of its results."""
    if problems and ended.failure is None:
        was, ended.status = ended.status, "failed"
        ended.failure = OutputError(f"the job has {was}, but its results are not whole: {'; '.join(problems)}")


def _say_where(folder: OutputFolder, summary: dict[str, Any]) -> None:
    """End with what came out and where it lies."""
    names = {
        f" on {name}": metrics.get("exact_match", (None, None)) for name, metrics in summary["evaluations"].items()
    }
    changes = names or {"": (summary["exact_match_first"], summary["exact_match_last"])}
    gains = (
        f", exact match{name} {first:.3f} -> {last:.3f}"
        for name, (first, last) in changes.items()
        if isinstance(first, float) and isinstance(last, float)
    )
    say(f"{summary['status']} after {summary['num_steps']} steps and {summary['seconds']:.0f} s{''.join(gains)}")
    if summary["num_steps_skipped"]:
        warn(
            f"{summary['num_steps_skipped']} of the steps changed no weight: in every group all rewards were equal, or "
            "the gradient was not finite"
        )
    for text in summary["warnings"]:
        warn(text)
    places = {"report": folder.report, "metrics": folder.summary, "error": folder.error_log, "model": folder.model}
    for what, path in places.items():
        if path.exists():
            say(f"  {what:8} {path}")
