"""What `train` and `sft` share: load the job, check it, run it, and leave results behind however it ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import typer

from verl_async.config import SftJob, TrainJob
from verl_async.report.saying import warn
from verl_engine.contract.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.report.output_folder import OutputFolder
    from verl_async.report.summary import RunStatus

INTERRUPTED = 130
"""Exit code after Ctrl-C, SIGTERM or SIGHUP."""

JobT = TypeVar("JobT", TrainJob, SftJob)
_JobT_contra = TypeVar("_JobT_contra", TrainJob, SftJob, contravariant=True)


class Runner(Protocol[_JobT_contra]):
    """Runs a job to its end; raises KeyboardInterrupt after a clean shutdown where the user asked for one."""

    def __call__(self, job: _JobT_contra, output: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        """Train, tell the listener, fill the timeline as time passes, and save the model into the output folder."""


@dataclass(frozen=True, slots=True)
class JobKind(Generic[JobT]):
    """What differs between the commands."""

    name: str
    """The command's."""
    load: Callable[[Path, Sequence[str]], JobT]
    check: Callable[[JobT, Path | None, bool], list[str]]
    """Job, output folder, whether to overwrite; returns warnings."""
    import_runner: Callable[[], Runner[JobT]]
    """Imports torch, transformers and ray; only called when the job really runs."""


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What the user asked for."""

    recipe: Path
    overrides: Sequence[str]
    output: Path | None
    overwrite: bool
    dry_run: bool


def run_job(kind: JobKind[JobT], request: JobRequest) -> None:
    """Carry out a command.

    Raises:
        EngineError: the job cannot start, or failed.
        typer.Exit: with code 130, after Ctrl-C, SIGTERM or SIGHUP.
    """
    try:
        _run_job(kind, request)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _run_job(kind: JobKind[JobT], request: JobRequest) -> None:
    job = kind.load(request.recipe, request.overrides)
    if request.output is None and not request.dry_run:
        raise ConfigError("--output is missing; name a new folder for the results, such as --output outputs/first")
    for warning in kind.check(job, request.output, request.overwrite):
        warn(warning)
    if request.dry_run or request.output is None:
        _show(job)
    else:
        _run(kind, job, request.output, overwrite=request.overwrite)


def _show(job: TrainJob | SftJob) -> None:
    """Print the resolved job: coloured on a terminal, else as it is, so that it can go into a file."""
    from verl_async.job import resolved
    from verl_async.report.output_folder import config_yaml

    text = config_yaml(resolved(job)) + framework_notes(job)
    if not sys.stdout.isatty():
        sys.stdout.write(text)
        return
    from rich.console import Console
    from rich.syntax import Syntax

    Console().print(Syntax(text, "yaml", background_color="default", word_wrap=True))


def framework_notes(job: TrainJob | SftJob) -> str:
    """Say what the engine hands to its framework, as comments: what is printed stays a recipe."""
    from verl_async.report.output_folder import config_yaml

    num_ranks = job.trainer.num_ranks
    handed = job.engine.resolved_framework_config(num_ranks)
    if handed is None:
        return ""
    heading = f"What backend {job.engine.backend} hands to its framework on {num_ranks} ranks:"
    lines = [heading, *config_yaml(handed).splitlines()]
    return "\n" + "".join(f"# {line}\n" for line in lines)


def _run(kind: JobKind[JobT], job: JobT, output: Path, *, overwrite: bool) -> None:
    from verl_async.command.results import EndedJob, leave_results
    from verl_async.job import resolved
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.preflight import input_paths
    from verl_async.report.listeners import Listeners
    from verl_async.report.metrics_log import MetricsLog
    from verl_async.report.output_folder import OutputFolder
    from verl_async.report.progress import open_progress
    from verl_async.report.record import RunRecord
    from verl_async.termination import signals_as_interrupt

    with signals_as_interrupt():
        runner = kind.import_runner()  # before the folder is made: what is not installed fails here
        folder = OutputFolder.create(output, overwrite=overwrite, inputs=input_paths(job))
        folder.write_config(resolved(job))
        record, timeline = RunRecord(), Timeline()
        listeners = Listeners([record])
        status: RunStatus = "failed"
        failure: BaseException | None = None
        try:
            with listeners.also(MetricsLog(folder)), listeners.also(open_progress(f"verl-engine {kind.name}")):
                runner(job, folder, listeners, timeline)
            status = "finished" if len(record.steps) >= record.num_steps > 0 else "stopped early"
        except KeyboardInterrupt as error:
            status, failure = "interrupted", error
        except SystemExit as error:  # whoever exits in this process must not end the command as if all were well
            failure = EngineError(f"something that the job called ended it by sys.exit({error.code!r})")
            failure.__cause__ = error
        except BaseException as error:  # noqa: BLE001 - raised below
            failure = error
        lost = any(isinstance(listener, MetricsLog) for listener, _ in listeners.failures)
        leave_results(ended := EndedJob(job, folder, record, timeline, status, failure), rewrite_log=lost)
    if ended.failure is not None:
        raise ended.failure
