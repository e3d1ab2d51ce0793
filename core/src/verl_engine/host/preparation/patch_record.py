"""What was patched in this process: by whom, when, and what was there before."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Literal

from verl_engine.host.preparation.targets import ABSENT, Target, short_repr

How = Literal["preparation", "first import"]


@dataclass(frozen=True, slots=True)
class PatchRecord:
    """One name that holds something else than its module put there."""

    module: str
    name: str
    """Below the module, such as ``Class.method``."""
    plugin: str
    """Names the backend with its distribution and version."""
    reason: str
    """As promised by the backend; empty for a patch that it did not promise."""
    original: str
    """A short description of what was there; `replaced_objects` has the objects themselves."""
    replacement: str
    how: How
    """Whether it was patched while the process was prepared, or when the module was imported later."""
    time_s: float
    """Seconds since the epoch."""
    pid: int
    """The process: a forked child has its parent's patches, and their records."""


_records: dict[Target, PatchRecord] = {}
_replaced: dict[Target, list[object]] = {}


def records() -> tuple[PatchRecord, ...]:
    """Return what was patched in this process, in order."""
    return tuple(_records.values())


def replaced_objects(target: Target) -> list[object]:
    """Return what a name held before, the oldest first; more than one where it was patched again."""
    return list(_replaced.get(target, ()))


def record_of(target: Target) -> PatchRecord | None:
    """Return the record of one name, if it was patched."""
    return _records.get(target)


def note_replaced(target: Target, former: object) -> None:
    """Remember an object that a name held, so that whoever still holds it is found."""
    if former is ABSENT:
        return
    known = _replaced.setdefault(target, [])
    if not any(former is other for other in known):
        known.append(former)


def note_patch(
    target: Target,
    plugin: str,
    original: object,
    replacement: object,
    how: How,
    reason: str = "",
) -> None:
    """Record a patch; one that is made again, as after a reload, keeps its record."""
    note_replaced(target, original)
    earlier = _records.get(target)
    if earlier is not None and earlier.plugin == plugin:
        _records[target] = replace(earlier, reason=reason or earlier.reason, replacement=short_repr(replacement))
        return
    _records[target] = PatchRecord(
        module=target.module,
        name=target.path,
        plugin=plugin,
        reason=reason,
        original=short_repr(original),
        replacement=short_repr(replacement),
        how=how,
        time_s=time.time(),
        pid=os.getpid(),
    )


def forget_plugin(plugin: str) -> list[Target]:
    """Drop the records of a backend whose preparation failed; return the names."""
    gone = [target for target, record in _records.items() if record.plugin == plugin]
    for target in gone:
        del _records[target]
    return gone
