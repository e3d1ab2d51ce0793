"""The metrics of a run on disk while it runs: ``metrics.jsonl`` and TensorBoard events."""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING

from verl_async.report.output_folder import OutputError, write_error
from verl_async.report.tensorboard_events import TensorBoardEvents

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from verl_async.report.output_folder import OutputFolder
    from verl_async.report.record import RunRecord


class MetricsLog:
    """A listener that writes each step and evaluation at once, so that a killed run keeps all but its last line.

    Use it as a context manager. A line of ``metrics.jsonl`` holds ``kind`` (``step`` or ``evaluation``), ``step``,
    ``time_s`` (seconds since the log was opened) and the metrics by name; one that is not finite is written as null.
    """

    def __init__(self, folder: OutputFolder) -> None:
        """Open the files.

        Raises:
            OutputError: they cannot be opened.
        """
        self._folder = folder
        self._start_s = time.monotonic()
        try:
            self._lines = folder.metrics.open("a", encoding="utf-8")
        except OSError as error:
            raise write_error(folder.metrics, error) from error
        try:
            self._events = TensorBoardEvents(folder.tensorboard)
        except BaseException:
            self._lines.close()
            raise

    def __enter__(self) -> Self:
        """Return the log itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files; everything is on disk already."""
        self._events.close()
        try:
            self._lines.close()
        except OSError as error:
            raise write_error(self._folder.metrics, error) from error

    def on_status(self, text: str) -> None:
        """Ignore what the job does now."""

    def on_note(self, text: str) -> None:
        """Ignore what is said of the job."""

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step; TensorBoard shows those without a group of their own under ``train/``.

        Raises:
            OutputError: the disk is full or the folder went away.
        """
        del num_steps
        self._write_line("step", step, metrics)
        self._events.add_scalars(step, {_grouped(name): value for name, value in metrics.items()})

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation; TensorBoard shows them under ``evaluation/``.

        Raises:
            OutputError: the disk is full or the folder went away.
        """
        self._write_line("evaluation", step, metrics)
        self._events.add_scalars(step, {f"evaluation/{name}": value for name, value in metrics.items()})

    def _write_line(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._lines.write(_line(kind, step, time.monotonic() - self._start_s, metrics))
            self._lines.flush()
        except OSError as error:
            raise write_error(self._folder.metrics, error) from error
        if not self._folder.is_ours():  # the open file took the line all the same
            raise OutputError(f"{self._folder.metrics} was deleted while the job ran")


def rewrite_metrics(folder: OutputFolder, record: RunRecord) -> None:
    """Write ``metrics.jsonl`` anew from memory, where the file was lost or is incomplete.

    Raises:
        OutputError: it cannot be written.
    """
    entries = [("step", entry) for entry in record.steps] + [("evaluation", entry) for entry in record.evaluations]
    entries.sort(key=lambda entry: entry[1].time_s)
    lines = (_line(kind, entry.step, entry.time_s, entry.metrics) for kind, entry in entries)
    folder.write_text(folder.metrics, "".join(lines))


def _line(kind: str, step: int, time_s: float, metrics: Mapping[str, float]) -> str:
    finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
    head = {"kind": kind, "step": step, "time_s": round(time_s, 3)}
    return json.dumps({**head, **finite}, allow_nan=False) + "\n"


def _grouped(name: str) -> str:
    return name if "/" in name else f"train/{name}"
