"""SIGTERM and SIGHUP end a job as Ctrl-C does: the same clean shutdown, the same files written."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import FrameType


_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
"""What a batch system, and a terminal that goes away, send."""


class _OnceAsInterrupt:
    """Goes through whatever handles Ctrl-C: asyncio cancels its main task, plain code sees KeyboardInterrupt.

    Only once: a lost terminal sends SIGHUP twice, batch systems repeat SIGTERM, and a second Ctrl-C ends the saving of
    the model that the first one began.
    """

    is_used = False

    def __call__(self, _signum: int, _frame: FrameType | None) -> None:
        if not self.is_used:
            self.is_used = True
            signal.raise_signal(signal.SIGINT)


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C inside, and Ctrl-C as such where it was ignored; put former handlers back.

    SIGHUP stays ignored where it was, as under `nohup`. Nests: Ray puts a handler of its own in place, so what runs
    after `ray.init` enters this again. Does nothing outside the main thread, where handlers cannot be set.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGINT)}
    # A script that starts a job with `&` has it ignore Ctrl-C: then nothing but a kill would end it.
    if former[signal.SIGINT] is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    handler = next((found for found in former.values() if isinstance(found, _OnceAsInterrupt)), _OnceAsInterrupt())
    for number in _ENDING:
        if number != signal.SIGHUP or former[number] is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        _set_handlers(former)


def _set_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # else it is none of Python's
            signal.signal(number, handler)


@contextmanager
def only_ctrl_c_interrupts() -> Iterator[None]:
    """Ignore SIGTERM and SIGHUP inside: the job is ending already."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, signal.SIG_IGN) for number in _ENDING}
    try:
        yield
    finally:
        _set_handlers(former)
