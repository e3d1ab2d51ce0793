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
    """Treat SIGTERM as Ctrl-C inside, and Ctrl-C as such where it was ignored; put the former handlers back on leaving.

    Nests: Ray puts a handler of its own in place, so what runs after `ray.init` enters this again. Does nothing outside
    the main thread, where handlers cannot be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, _interrupt)
    # A script that starts a job with `&` has it ignore Ctrl-C: then nothing but a kill would end it.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if is_ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if is_ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, former)
