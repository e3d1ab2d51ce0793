"""Replace one name of a module, now or at its first import, and the record of what was replaced in this process."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final

from verl_engine.contract.errors import PatchError
from verl_engine.patching.first_import import How, owner, patch_on_import
from verl_engine.patching.references import find_references
from verl_engine.patching.target import ABSENT, Target, short_repr

_NOBODY: Final = "code outside of any preparation"


@dataclass(frozen=True, slots=True)
class PatchRecord:
    """One name that holds something else than its module put there."""

    module: str
    name: str
    """Below the module, such as ``Class.method``."""
    plugin: str
    """Names the backend with its distribution and version."""
    reason: str
    """As declared by the backend; empty for a patch that it did not declare."""
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


def patch(target: str, make: Callable[[Any], object]) -> None:
    """Replace what a name holds, right after its module's first import, or now if that is past.

    Call it in ``engine_prepare_process``. `records` lists what it did. Where the module is imported already, others may
    have taken the original from it: a name in ``BackendSpec.patches`` is checked for that.

        patch("megatron.core.optimizer:Adam", lambda original: CpuAdam)

    Args:
        target: ``module:attribute`` or ``module:Class.method``.
        make: gets the original as it is stored in the module or class, and returns what to put there.
    Raises:
        PatchError: the name is not there or cannot be changed. At a later import it makes the import fail.
    """
    name = Target.parse(target)

    def apply(module: ModuleType) -> None:
        original = name.get(module)
        if original is ABSENT:
            whom = owner.get()[0] or _NOBODY
            raise PatchError(f"{name} is not there to be patched for {whom}; is this another version of it?")
        replacement = make(original)
        name.set(replacement, module)
        record_patch(name, original, replacement)

    patch_on_import(name.module, apply)


def fix_references(target: str) -> list[str]:
    """Put what a name holds now into every place that still holds what it held before; return the places.

    For backends whose patcher replaces names only. Places that the backend lists as ``kept_by`` are not known here:
    call it for names that nobody keeps on purpose. A PatchError where a place cannot be changed.
    """
    name = Target.parse(target)
    references = find_references(replaced_objects(name))
    for reference in references:
        reference.replace(name.get())
    return list(map(str, references))


def records() -> tuple[PatchRecord, ...]:
    """Return what was patched in this process, in order."""
    return tuple(_records.values())


def replaced_objects(target: Target) -> list[object]:
    """Return what a name held before, the oldest first; more than one where it was patched again."""
    return list(_replaced.get(target, ()))


def note_replaced(target: Target, former: object) -> None:
    """Remember an object that a name held, so that whoever still holds it is found."""
    known = _replaced.setdefault(target, [])
    if former is not ABSENT and not any(former is other for other in known):
        known.append(former)


def record_patch(target: Target, original: object, replacement: object, reason: str = "") -> None:
    """Record a patch of the current owner's; one that is made again, as after a reload, keeps its record."""
    note_replaced(target, original)
    (plugin, how), known = owner.get(), _records.get(target)
    if known is not None and known.plugin == (plugin or _NOBODY):
        _records[target] = replace(known, reason=reason or known.reason, replacement=short_repr(replacement))
        return
    shown = short_repr(original), short_repr(replacement)
    _records[target] = PatchRecord(*target, plugin or _NOBODY, reason, *shown, how, time.time(), os.getpid())


def forget_records(plugin: str) -> list[Target]:
    """Drop the records of a backend whose preparation failed; return the names."""
    gone = [target for target, record in _records.items() if record.plugin == plugin]
    for target in gone:
        del _records[target]
    return gone
