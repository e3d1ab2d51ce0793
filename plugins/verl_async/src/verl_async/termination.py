"""SIGTERM ends a job as Ctrl-C does: the same clean shutdown, the same files written."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    """Go through whatever handles Ctrl-C now: asyncio cancels its main task, plain code sees KeyboardInterrupt."""
    signal.raise_signal(signal.SIGINT)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C inside; put the former handler back on leaving.

    Nests: Ray puts a handler of its own in place, so what runs after `ray.init` enters this again. Does nothing outside
    the main thread, where handlers cannot be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
