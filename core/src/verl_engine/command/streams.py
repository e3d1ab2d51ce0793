"""Standard output and error that nobody reads: closed, a pipe to a program that has ended, a full disk."""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def open_closed_streams() -> None:
    """Replace those that were closed when the process started: else the next file opened would take their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - until the process ends


def silence(stream: TextIO) -> None:
    """Have a stream that cannot be written lead nowhere: Python would complain at its end, and change the exit code."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def flush_streams() -> str | None:
    """Write what is left, and return why standard output is not whole; a program that stopped reading is no reason."""
    reason = None
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            silence(stream)
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                reason = f"standard output cannot be written: {error}"
    return reason
