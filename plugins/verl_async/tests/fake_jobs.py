"""The command with a driver of a test's own in place of Ray's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from verl_async.command.run_job import JobKind, JobRequest, run_job
from verl_async.job import load_train_job
from verl_async.orchestrator.timeline import Span
from verl_async.preflight import check_train_job

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_async.config import TrainJob
    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.report.output_folder import OutputFolder

# Runs the command, then tells which heavy modules that took.
LAUNCH = """
import sys
from verl_engine.command.app import main
try:
    main()
finally:
    heavy = {"torch", "transformers", "ray", "pyarrow", "matplotlib"} & set(sys.modules)
    print("heavy modules:", *sorted(heavy), file=sys.stderr)
"""

METRICS = {"loss": 0.5, "reward": 0.25, "exact_match": 0.25, "step_applied": 1.0}


def run_fake_job(
    recipe: Path, output: Path, run: Callable[[OutputFolder, JobListener, Timeline], None], *, overwrite: bool = False
) -> None:
    """Run the command with a driver of the test's own."""

    def runner(job: TrainJob, output: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        assert job.trainer.num_steps == 3
        run(output, listener, timeline)

    kind = JobKind("train", load_train_job, check_train_job, lambda: runner)
    run_job(kind, JobRequest(recipe, (), output, overwrite=overwrite, dry_run=False))


def report_steps(listener: JobListener, timeline: Timeline, number: int) -> None:
    """Report so many steps of three."""
    listener.on_status("training")
    for step in range(1, number + 1):
        listener.on_step(step, 3, METRICS)
        timeline.spans.append(Span("trainer", "train", step - 1, step))


def read_summary(output: Path) -> dict[str, Any]:
    """Read summary.json."""
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary
