"""On whose behalf the code runs that patches something: a backend's label, for the record and for messages."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_owner: ContextVar[str] = ContextVar("owner", default="code outside of any preparation")


def current_owner() -> str:
    """Name the backend whose preparation runs, or whose callback."""
    return _owner.get()


@contextmanager
def owned_by(owner: str) -> Iterator[None]:
    """Make a backend the owner meanwhile."""
    token = _owner.set(owner)
    try:
        yield
    finally:
        _owner.reset(token)


_preparing: ContextVar[bool] = ContextVar("preparing", default=False)


def is_preparing() -> bool:
    """Whether ``engine_prepare_process`` runs just now."""
    return _preparing.get()


@contextmanager
def preparing(owner: str) -> Iterator[None]:
    """Mark the time in which a backend's ``engine_prepare_process`` runs."""
    token = _preparing.set(True)
    try:
        with owned_by(owner):
            yield
    finally:
        _preparing.reset(token)
