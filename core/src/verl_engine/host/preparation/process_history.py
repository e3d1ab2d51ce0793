"""What this process has behind it: forks, and which modules came in while a backend was at work."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from verl_engine.host.preparation.importers import describe_importers

if TYPE_CHECKING:
    from collections.abc import Iterator


class _History:
    """The one of this process; a forked child goes on with its parent's."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.parent: int | None = None
        """The process that this one was forked from, if core was imported there already."""
        self.inherited: frozenset[str] = frozenset()
        """What was imported at the fork."""
        self.imported_by: dict[str, str] = {}
        """Module and the backend that was preparing or creating when it came in."""

    def note_fork(self) -> None:
        self.parent, self.pid = self.pid, os.getpid()
        self.inherited = frozenset(sys.modules)


_history = _History()
os.register_at_fork(after_in_child=_history.note_fork)


@contextmanager
def attributing_imports(label: str) -> Iterator[None]:
    """Remember that what is imported meanwhile is a backend's doing.

    Args:
        label: names the backend in messages.
    """
    before = set(sys.modules)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            _history.imported_by.setdefault(name, label)


def importing_backend(name: str) -> str | None:
    """Name the backend whose preparation or creation imported a module, if one did."""
    return _history.imported_by.get(name)


def explain_import(name: str, own: str = "") -> str:
    """Say who imported a module, and what to do so that it is imported later.

    Args:
        name: a module in ``sys.modules``.
        own: the top-level package of the backend that is not prepared yet, so that no function of it has run.
    """
    who = describe_importers(name, own)
    fork = _explain_fork(name)
    backend = importing_backend(name)
    if fork:
        return f"{who}{fork}"
    if backend is not None:
        return (
            f"{who}, while {backend} was prepared or created in this process. The two cannot share a process in this "
            "order: prepare this backend first, or give each a process of its own"
        )
    return f"{who}. Import it later, or start this backend in a process that does not import it"


def _explain_fork(name: str) -> str:
    """Say that a forked child has a module from its parent; empty where it has not, or where none can tell."""
    advice = "start this process by spawn or forkserver, or fork before the import"
    if name in _history.inherited:
        parent = _history.parent
        return f". This process has it from its parent, process {parent}, which imported it before the fork: {advice}"
    parent = _forked_by() if _history.parent is None else None
    if parent is not None:
        return f". This process was forked by process {parent}, which probably imported it before the fork: {advice}"
    return ""


def _forked_by() -> int | None:
    """The parent of a child that multiprocessing forked before core was imported; None where it started afresh."""
    module = sys.modules.get("multiprocessing.process")
    parent = module.parent_process() if module is not None else None
    if parent is None or "--multiprocessing-fork" in sys.orig_argv:  # the mark of spawn
        return None
    return int(parent.pid)
