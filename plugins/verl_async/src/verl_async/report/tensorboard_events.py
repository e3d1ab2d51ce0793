"""Scalars in TensorBoard's own file format, without torch, TensorFlow or a thread.

torch's SummaryWriter needs torch, and TensorBoard's EventFileWriter imports TensorFlow wherever that is installed. Both
put the same records together from the two parts used here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from verl_async.report.output_folder import write_error

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class TensorBoardEvents:
    """One event file, flushed after each call so that TensorBoard follows a running job."""

    def __init__(self, folder: Path) -> None:
        """Start a new event file in `folder`.

        Raises:
            OutputError: it cannot be written.
        """
        # TensorBoard finds files by "tfevents" and reads them in the order of their names: the time comes first.
        self._path = folder / f"events.out.tfevents.{time.time_ns() // 1000}.verl_async"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # RecordWriter closes it; `close` below is its end.
            self._records = RecordWriter(self._path.open("xb"))
        except OSError as error:
            raise write_error(self._path, error) from error
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write scalars of one step by tag.

        Raises:
            OutputError: the disk is full or the folder went away.
        """
        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in scalars.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Close the file."""
        try:
            self._records.close()
        except OSError as error:
            raise write_error(self._path, error) from error

    def _write(self, event: Event) -> None:
        try:
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError as error:
            raise write_error(self._path, error) from error
