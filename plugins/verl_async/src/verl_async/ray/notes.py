"""What packages log in an actor, for the driver to show: an actor's own output is far from whoever watches the job."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def notes_of_packages(*packages: str) -> Iterator[list[str]]:
    """Collect what the packages log inside, at INFO and above, in the order it comes.

    Args:
        packages: names of loggers; those below them count too.
    """
    notes: list[str] = []
    handler = _Notes(notes)
    loggers = [logging.getLogger(name) for name in packages]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield notes
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


class _Notes(logging.Handler):
    """Appends each message to a list."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.INFO)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(record.getMessage())
