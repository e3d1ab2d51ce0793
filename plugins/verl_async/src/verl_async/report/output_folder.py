"""The folder that a job leaves behind, and how files get into it whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import traceback
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from verl_engine.contract.errors import ConfigError, EngineError
from verl_engine.contract.yaml_text import write_yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from verl_async.orchestrator.timeline import Span

_MARKER: Final = "metrics.jsonl"
"""Created first and exclusively: of two jobs that start on one folder, one gets it and the other is told."""


class OutputError(EngineError):
    """A result could not be written: the disk is full, or the folder went away."""


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """Where a job's results go. Made by `create`; the constructor alone touches nothing."""

    path: Path
    _claims: list[int] = field(default_factory=list, compare=False, repr=False)
    """Descriptor of the marker, each time that this job made it. Open, so that no other file gets its inode."""

    @property
    def config(self) -> Path:
        """The resolved job, as YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One JSON object a line for each step and evaluation."""
        return self.path / _MARKER

    @property
    def timeline(self) -> Path:
        """One JSON object a line for each stretch of an actor's time."""
        return self.path / "timeline.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        """The headline metrics, as JSON."""
        return self.path / "summary.json"

    @property
    def model(self) -> Path:
        """The trained model, as a Hugging Face folder."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        """The report, one HTML file that needs nothing else."""
        return self.path / "report.html"

    @property
    def ray_token(self) -> Path:
        """While the job runs: the token of its own Ray cluster, readable by its user only."""
        return self.path / ".ray_token"

    @classmethod
    def check(cls, path: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> None:
        """Say whether `create` would accept `path`, without changing anything.

        Args:
            path: the folder asked for.
            overwrite: whether results of an earlier job may be deleted.
            inputs: files and folders that the job reads; deleting them is refused.

        Raises:
            ConfigError: the folder is in use, not a folder or not writable, or deleting its content could lose work.
        """
        try:
            str(path).encode()
        except UnicodeEncodeError as error:
            raise ConfigError(f"--output {str(path)!a} is not UTF-8 text; choose another --output") from error
        try:
            entries = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
        except NotADirectoryError as error:
            raise ConfigError(f"--output {path} is a file, not a folder; choose another --output") from error
        except OSError as error:
            raise _unusable(path, error) from error
        _check_writable(path)
        if entries and not overwrite:
            raise ConfigError(
                f"--output {path} is not empty: it holds {_listed(entries)}; "
                "choose another --output, or pass --overwrite to replace the results of an earlier job"
            )
        known = {entry.name for entry in cls(path).entries}
        foreign = [name for name in entries if name not in known and not _is_unfinished(name)]
        if foreign:
            raise ConfigError(
                f"--output {path} holds {_listed(foreign)}, which no job wrote, so --overwrite does not delete it; "
                "choose another --output"
            )
        resolved = path.resolve()
        lost = [source for source in inputs if entries and source.resolve().is_relative_to(resolved)]
        if lost:
            raise ConfigError(
                f"--output {path} holds {lost[0]}, which this job reads, so --overwrite would delete its input; "
                "choose another --output"
            )

    @classmethod
    def create(cls, path: Path, *, overwrite: bool = False, inputs: Iterable[Path] = ()) -> OutputFolder:
        """Make the folder, and claim it for this job.

        Args:
            path: a folder that does not exist or is empty.
            overwrite: delete the results of an earlier job first; files that no job wrote are never deleted.
            inputs: files and folders that the job reads; deleting them is refused.

        Raises:
            ConfigError: as `check`, or another job claimed the folder at the same moment.
        """
        cls.check(path, overwrite=overwrite, inputs=inputs)
        folder = cls(path.absolute())  # the processes that save the model may run in another folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._delete_earlier_results()
            folder._claim()
        except FileExistsError as error:
            raise ConfigError(f"--output {path} was just taken by another job; choose another --output") from error
        except OSError as error:
            raise _unusable(path, error) from error
        return folder

    def _claim(self) -> None:
        self._claims.append(os.open(self.metrics, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))

    def is_ours(self) -> bool:
        """Tell whether the folder is there, and is the one that this job made."""
        try:
            status = self.metrics.stat()
        except OSError:
            return False
        return not self._claims or os.path.samestat(status, os.fstat(self._claims[-1]))

    @property
    def was_deleted(self) -> bool:
        """Whether it went away while the job ran, and was made again."""
        return len(self._claims) > 1

    def claim_again(self) -> None:
        """Make the folder again, where it was deleted.

        Raises:
            OutputError: it cannot be made, or is another job's by now.
        """
        if self.is_ours():
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._claim()
        except FileExistsError as error:
            raise OutputError(f"{self.path} was deleted, and is another job's by now") from error
        except OSError as error:
            raise write_error(self.path, error) from error

    @property
    def error_log(self) -> Path:
        """The whole story of a failure, other libraries' words too: for its user only."""
        return self.path / "error.log"

    @property
    def entries(self) -> tuple[Path, ...]:
        """Everything that a job may leave in the folder."""
        files = (self.config, self.metrics, self.timeline, self.summary, self.report, self.ray_token, self.error_log)
        return (*files, self.tensorboard, self.model)

    def write_config(self, job: Mapping[str, Any]) -> None:
        """Write the resolved job (see `verl_async.job.resolved`) as YAML that the command reads again.

        Raises:
            OutputError: it cannot be written.
        """
        self.write_text(self.config, config_yaml(job))

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Write the headline metrics as JSON.

        Raises:
            OutputError: it cannot be written.
            ValueError: a metric is not finite, which JSON cannot hold.
        """
        self.write_text(self.summary, json.dumps(summary, indent=2, allow_nan=False) + "\n")

    def write_timeline(self, spans: Iterable[Span]) -> None:
        """Write one JSON object a line for each span: who, what, start_s, end_s.

        Raises:
            OutputError: it cannot be written.
        """
        rows = (
            {"who": span.who, "what": span.what, "start_s": round(span.start_s, 6), "end_s": round(span.end_s, 6)}
            for span in spans
        )
        self.write_text(self.timeline, "".join(json.dumps(row) + "\n" for row in rows))

    def write_error_log(self, failure: BaseException) -> None:
        """Write the traceback of what ended the job, readable by its user only.

        Raises:
            OutputError: it cannot be written.
        """
        self.write_text(self.error_log, "".join(traceback.format_exception(failure)), mode=0o600)

    def write_text(self, path: Path, text: str, mode: int = 0o666) -> None:
        """Write a file whole or not at all: readers see the old content until the new one is complete.

        Raises:
            OutputError: it cannot be written.
        """
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(unfinished, "w", encoding="utf-8", opener=partial(os.open, mode=mode)) as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise write_error(path, error) from error

    def _delete_earlier_results(self) -> None:
        unfinished = [entry for entry in self.path.iterdir() if _is_unfinished(entry.name)]
        for entry in (*self.entries, *unfinished):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)


def config_yaml(job: Mapping[str, Any]) -> str:
    """Render a resolved job as YAML, in the order of its sections."""
    return write_yaml(job)


def write_error(path: Path, error: OSError) -> OutputError:
    """Return the error for a result that the operating system refused to write."""
    return OutputError(
        f"cannot write {path}: {error.strerror or error}; make room or give write access, "
        "or choose another --output and start again"
    )


def _check_writable(path: Path) -> None:
    nearest = path
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        raise ConfigError(f"--output {path}: {nearest} is a file, not a folder; choose another --output")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(f"--output {path}: no permission to write in {nearest}; choose another --output")


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--output {path} cannot be used: {error.strerror or error}; choose another --output")


def _is_unfinished(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _listed(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
