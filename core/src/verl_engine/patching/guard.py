"""Prepare a process for a backend, guarded: before its framework is imported, wholly, once, or not at all."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Literal

from verl_engine.contract.backend import BackendSpec, DeclaredPatch
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ImportOrderError, PatchError, PreparationConflictError
from verl_engine.patching.first_import import AFTER, BEFORE, owned_by, patch_on_import, stop_waiting, waiting_modules
from verl_engine.patching.import_recorder import explain_import, is_within
from verl_engine.patching.patches import forget_records, note_replaced, record_patch, replaced_objects
from verl_engine.patching.references import find_references, inner_function
from verl_engine.patching.target import ABSENT, Target

_FRESH = "Start a fresh process for it"


@dataclass(eq=False)
class Preparation:
    """Of this process, for one backend. A forked child inherits it with what it has done."""

    backend: object
    """The hooks module; two hosts of one backend share a preparation."""
    label: str
    """Names the backend in messages."""
    spec: BackendSpec
    config: EngineConfig
    declared: Iterable[DeclaredPatch]
    """What the backend patches under the config."""
    state: Literal["new", "running", "done", "failed"] = "new"
    failure: str = ""
    pid: int = field(default_factory=os.getpid)

    def __post_init__(self) -> None:
        self.targets = {Target.parse(patch.target): patch for patch in self.declared}
        self._searched: set[object] = set()
        """Modules, and originals, that a whole search for references found nothing in, and of."""

    def run(self, hook: Callable[[], object]) -> None:
        """Call the hook and `check`; where either fails, what was patched is put back, as far as it is known here."""
        self.state = "running"
        try:
            with owned_by(self.label, "preparation"):
                for module in dict.fromkeys(target.module for target in self.targets):
                    mine = [target for target in self.targets if target.module == module]
                    patch_on_import(module, partial(self._look, mine), phase=BEFORE)
                    patch_on_import(module, partial(self.check_names, mine), phase=AFTER)
                hook()
            self.check()
        except BaseException as error:
            self._undo()
            self.state, self.failure = "failed", f"{type(error).__name__}: {error}"
            raise
        self.state = "done"

    def accept(self, config: EngineConfig) -> None:
        """Accept a second preparation that would do nothing new; a PreparationConflictError or PatchError, if not."""
        if self.state == "failed":
            raise PatchError(
                f"this process cannot be used for {self.label}: an earlier preparation failed ({self.failure}) and may "
                f"have left patches behind. {_FRESH}"
            )
        fields = self.spec.process_settings
        if fields is None:  # observers change nothing
            fields = tuple(name for name in type(self.config).model_fields if name != "observers")
        pairs = [(name, getattr(self.config, name, None), getattr(config, name, None)) for name in fields]
        differences = [f"engine.{name}={old!r} (now {new!r})" for name, old, new in pairs if old != new]
        if differences:
            is_forked = self.pid != os.getpid()
            process = f"this process was forked by process {self.pid}, which was" if is_forked else "this process is"
            raise PreparationConflictError(
                f"{process} prepared for {self.label} with {', '.join(differences)}; patches cannot be made "
                f"again with other settings. {_FRESH}, or leave out of BackendSpec.process_settings what preparation "
                "does not depend on"
            )
        self.check_names()

    def check(self) -> None:
        """Check that every name is patched, and that nobody holds an original; else raise a PatchError that says where.

        The search through all modules takes ten times as long as building a small engine. It is made again only where
        a module or an original came in since: only an import can have taken an original, before it was patched.
        """
        self.check_names()
        present: set[object] = {(name, id(module)) for name, module in sys.modules.items()}
        present |= {id(held) for target in self.targets for held in replaced_objects(target)}
        stale = [] if present <= self._searched else self.stale_references()
        if stale:
            raise PatchError(
                f"{self.label} patched too late for some: {'; '.join(stale)}. Patch at the first import "
                "(verl_engine.patch) before they take it, or list a module that keeps an original on purpose under "
                "DeclaredPatch.kept_by"
            )
        self._searched = present

    def check_names(self, targets: Iterable[Target] | None = None, module: ModuleType | None = None) -> None:
        """Check the declared names alone, by default all, and record their patches; a PatchError where one is not.

        The `module` of the targets is given where it is just being imported; it must hold no original either.
        """
        if module is not None and self.state == "running":  # a patcher that imports first and patches then is at work
            return
        faults, patched, waiting = [], [], waiting_modules(self.label)
        for target in self.targets if targets is None else targets:
            current, formers = target.get(module), replaced_objects(target)
            if current is not ABSENT:
                patched.append((target, next(iter(formers), ABSENT), current, self.targets[target].reason))
                faults += [f"{target} holds its original" for former in formers if former is current]
            elif target.module in sys.modules:
                faults.append(f"{target} is not there")
            elif target.module not in waiting:
                faults.append(f"{target} is not patched: {target.module} is not imported, and no patch waits for it")
        problem = f"{self.label} did not patch what it declares in BackendSpec.patches"
        if module is not None:
            faults = faults or self.stale_references([module.__name__])
            problem = f"importing {module.__name__} now would leave it unpatched for {self.label}"
        if faults:
            raise PatchError(f"{problem}: {'; '.join(faults)}")
        with owned_by(self.label, "preparation" if self.state == "running" else None):
            for patch in patched:
                record_patch(*patch)

    def stale_references(self, modules: Iterable[str] | None = None) -> list[str]:
        """Say who holds an original; all in one search, which takes a quarter of a second over all modules."""
        originals = [(original, target) for target in self.targets for original in replaced_objects(target)]
        owners = {id(same): target for original, target in originals for same in (original, inner_function(original))}
        replacements = [target.get() for target in self.targets]
        return [
            f"{reference} holds the original of {target}"
            for reference in find_references([original for original, _ in originals], replacements, modules)
            for target in [owners[id(reference.held)]]
            if not any(is_within(reference.module, keeper) for keeper in self.targets[target].kept_by)
        ]

    def _look(self, targets: list[Target], module: ModuleType) -> None:
        for target in targets:
            note_replaced(target, target.get(module))

    def _undo(self) -> None:
        """Put the oldest originals back, also where replacements were taken from their names, as far as can be done."""
        stop_waiting(self.label)
        held = {target: target.get() for target in {*self.targets, *forget_records(self.label)}}
        counts = Counter(map(id, held.values()))
        for target, replacement in held.items():
            original = next(iter(replaced_objects(target)), ABSENT)
            if original is ABSENT or replacement is ABSENT or replacement is original:
                continue
            with suppress(PatchError):  # the process is refused anyhow, with the error that led here
                target.set(original)
            home, name = getattr(replacement, "__module__", None), target.path.rpartition(".")[2]
            for reference in find_references([replacement]):
                # What replaces other names too was taken from this one only where it is called so.
                is_its = counts[id(replacement)] == 1 or reference.place.rpartition(".")[2] == name
                with suppress(PatchError):
                    if is_its and reference.module != home:
                        reference.replace(original)


_preparations: dict[int, Preparation] = {}
"""By identity of the backend's hooks module; the preparation keeps it alive."""


def prepare(preparation: Preparation, hook: Callable[[], object]) -> None:
    """Prepare this process for a backend by its ``engine_prepare_process``, unless it is prepared already.

    Raises as `BackendHost.prepare_process` does.
    """
    key, label, spec = id(preparation.backend), preparation.label, preparation.spec
    if key in _preparations:
        _preparations[key].accept(preparation.config)
        return
    for other in _preparations.values():
        shared = sorted(map(str, preparation.targets.keys() & other.targets.keys()))
        if shared and other.state == "done":
            raise PreparationConflictError(
                f"{label} patches {', '.join(shared)}, and so did {other.label} when it prepared this process; the two "
                "cannot share one. Give each a process of its own"
            )
    for root in spec.must_precede:
        if early := explain_import(root):
            raise ImportOrderError(f"{label} must prepare the process before {root} is imported, but {early}")
    _preparations[key] = preparation
    try:
        preparation.run(hook)
    except BaseException:
        if not (spec.must_precede or preparation.targets):  # nothing half done that is known here
            del _preparations[key]
        raise


def require_preparation(backend: object, label: str, spec: BackendSpec) -> Preparation | None:
    """Return a backend's preparation, if any; an ImportOrderError where it needs one, a PatchError if that failed."""
    found = _preparations.get(id(backend))
    if found is not None and found.state == "failed":
        found.accept(found.config)
    if (found is None or found.state == "running") and (spec.must_precede or spec.patches):
        raise ImportOrderError(
            f"{label} creates an engine in a process that it has not prepared; call "
            "BackendHost.prepare_process(config) first, before its framework is imported (EngineWorker.prepare does)"
        )
    return found
