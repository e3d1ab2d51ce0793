"""Prepare a process for a backend, guarded: before its framework is imported, wholly, once, or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from verl_engine.contract.errors import (
    EngineError,
    HookError,
    ImportOrderError,
    PatchError,
    PreparationConflictError,
)
from verl_engine.host.preparation.importers import first_loaded
from verl_engine.host.preparation.owner import preparing
from verl_engine.host.preparation.patch_promises import PatchPromises, checked_promises
from verl_engine.host.preparation.process_history import attributing_imports, explain_import

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_engine.contract.backend import BackendSpec, PatchPromise
    from verl_engine.contract.engine_config import EngineConfig

_UNSET = object()
_FRESH = "Start a fresh process for it"


class Preparation:
    """One backend's preparation of this process. A forked child inherits it with what it has done."""

    def __init__(self, backend: object, label: str, spec: BackendSpec, config: EngineConfig) -> None:
        """Remember who prepares with what; `run` does it."""
        self.backend = backend
        self.label = label
        self.spec = spec
        self.config = config
        self.pid = os.getpid()
        self.promises = PatchPromises(label, _promised_patches(label, spec, config))
        self.state: Literal["running", "done", "failed"] = "running"
        self.failure = ""

    def run(self, hook: Callable[[], object]) -> None:
        """Call the hook, and check that it kept the backend's promises.

        Raises:
            ImportOrderError: a module that it must precede is imported already.
            PatchError: a promised patch did not take, or somebody holds an original.
            Exception: whatever the hook raises. What it patched is put back, as far as the host knows of it.
        """
        try:
            self.promises.watch()
            with attributing_imports(self.label), preparing(self.label):
                hook()
            self.promises.check()
        except BaseException as error:
            self.promises.undo()
            self.state, self.failure = "failed", f"{type(error).__name__}: {error}"
            raise
        self.promises.settle()
        self.state = "done"

    def accept(self, config: EngineConfig) -> None:
        """Accept that the backend is prepared again, if that would do nothing new.

        Raises:
            PreparationConflictError: it was prepared with other settings.
            PatchError: preparation failed before, or its patches are gone.
        """
        if self.state == "failed":
            raise PatchError(
                f"this process cannot be used for {self.label}: an earlier preparation failed ({self.failure}) and may "
                f"have left patches behind. {_FRESH}"
            )
        differences = self._differences(config)
        if differences:
            raise PreparationConflictError(
                f"{self._place()} prepared for {self.label} with {', '.join(differences)}; patches cannot be made "
                f"again with other settings. {_FRESH}, or leave out of BackendSpec.process_settings what preparation "
                "does not depend on"
            )
        self.promises.check_names()

    def check_other(self, other: Preparation) -> None:
        """Refuse two backends that would patch the same names.

        Raises:
            PreparationConflictError: they would.
        """
        shared = sorted(map(str, self.promises.targets.keys() & other.promises.targets.keys()))
        if shared and other.state == "done":
            raise PreparationConflictError(
                f"{self.label} patches {', '.join(shared)}, and so did {other.label} when it prepared this process; "
                "the two cannot share one. Give each a process of its own"
            )

    def _differences(self, config: EngineConfig) -> list[str]:
        fields = self.spec.process_settings
        if fields is None:  # observers only look on
            fields = tuple(name for name in type(self.config).model_fields if name != "observers")
        old = {name: getattr(self.config, name, _UNSET) for name in fields}
        new = {name: getattr(config, name, _UNSET) for name in fields}
        return [f"engine.{name}={old[name]!r} (now {new[name]!r})" for name in fields if old[name] != new[name]]

    def _place(self) -> str:
        if self.pid == os.getpid():
            return "this process is"
        return f"this process was forked by process {self.pid}, which was"


_preparations: dict[int, Preparation] = {}
"""By identity of the backend's hooks module; the preparation keeps it alive."""


def prepare(backend: object, label: str, spec: BackendSpec, config: EngineConfig, hook: Callable[[], object]) -> None:
    """Prepare this process for a backend, unless it is already.

    Args:
        backend: the hooks module; two hosts of one backend share a preparation.
        label: names the backend in messages.
        spec: of the backend.
        config: the validated engine section.
        hook: runs ``engine_prepare_process``.
    Raises:
        PluginError: see `Preparation`.
    """
    earlier = _preparations.get(id(backend))
    if earlier is not None:
        earlier.accept(config)
        return
    preparation = Preparation(backend, label, spec, config)
    for other in _preparations.values():
        preparation.check_other(other)
    _check_order(backend, label, spec)
    _preparations[id(backend)] = preparation
    try:
        preparation.run(hook)
    except BaseException:
        if not (spec.must_precede or preparation.promises.targets):  # nothing half done that the host knows of
            del _preparations[id(backend)]
        raise


def require_preparation(backend: object, label: str, spec: BackendSpec) -> Preparation | None:
    """Refuse to go on without a preparation that the backend depends on.

    Returns:
        The preparation, if there is one.
    Raises:
        ImportOrderError: there is none.
        PatchError: it failed.
    """
    found = _preparations.get(id(backend))
    if found is not None and found.state == "failed":
        found.accept(found.config)
    if (found is None or found.state == "running") and (spec.must_precede or spec.patches):
        raise ImportOrderError(
            f"{label} creates an engine in a process that it has not prepared; call "
            "BackendHost.prepare_process(config) first, before its framework is imported (EngineWorker.prepare does)"
        )
    return found


def _promised_patches(label: str, spec: BackendSpec, config: EngineConfig) -> tuple[PatchPromise, ...]:
    try:
        promises: object = spec.promised_patches(config)
    except EngineError:  # such as a device that is not there
        raise
    except Exception as cause:  # a stranger's function can raise anything
        raise HookError(f"{label}: SPEC.patches(config) failed: {type(cause).__name__}: {cause}") from cause
    return checked_promises(promises, label)


def _check_order(backend: object, label: str, spec: BackendSpec) -> None:
    own: str = getattr(backend, "__name__", type(backend).__module__)
    for root in spec.must_precede:
        name = first_loaded(root)
        if name is not None:
            raise ImportOrderError(
                f"{label} must prepare the process before {root} is imported, but {name} is there already, "
                f"{explain_import(name, own.partition('.')[0])}"
            )
