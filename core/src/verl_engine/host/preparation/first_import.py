"""Run something right after a module's import, before its importer goes on: so nobody ever sees the module without it.

One finder in front of ``sys.meta_path`` waits for the modules by name. It stays while anything waits, also after the
first import: a reload, or a second import after a failed one, makes the module anew and undoes what was done to it.
"""

from __future__ import annotations

import importlib.util
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_engine.contract.errors import PatchError
from verl_engine.host.preparation.owner import current_owner, owned_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class Phase(IntEnum):
    """In which order things run after an import."""

    LOOK = 0
    """The host looks at the originals."""
    PATCH = 1
    CHECK = 2
    """The host checks that the patches took."""


class _Waiting(NamedTuple):
    phase: Phase
    callback: Callable[[ModuleType], None]
    owner: str


def patch_on_import(module_name: str, callback: Callable[[ModuleType], None]) -> None:
    """Run ``callback(module)`` right after the module's first import, and after each that follows, such as a reload.

    For ``engine_prepare_process``: a backend that patches so needs not import its framework there, and nobody can take
    a name from the module before it is patched, whoever imports it first. Where the module is imported already, the
    callback runs at once; a backend that would then be too late also says so in ``BackendSpec.must_precede``.

    An exception of the callback makes the import fail, so the module is never there half patched.

    Args:
        module_name: such as ``megatron.core.optimizer``; also one of a package that is not installed.
        callback: gets the module; changes it in place.
    Raises:
        PatchError: the module is just being imported: whoever imports it is calling this.
    """
    run_after_import(module_name, callback, Phase.PATCH)


def run_after_import(module_name: str, callback: Callable[[ModuleType], None], phase: Phase) -> None:
    """As `patch_on_import`, in a phase."""
    module = sys.modules.get(module_name)
    if module is not None and module_name in _finder.running:  # asked for by a callback of this same import
        callback(module)
        return
    if module is not None:
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            raise PatchError(f"{module_name} is just being imported: too late to wait for it, too early to patch it")
        callback(module)
    waiting = _finder.waiting.setdefault(module_name, [])
    waiting.append(_Waiting(phase, callback, current_owner()))
    waiting.sort(key=lambda item: item.phase)  # stable: within a phase in the order of registration
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def waits_for(module_name: str, owner: str) -> bool:
    """Whether the owner left a patch for a module's import."""
    return any(item.owner == owner and item.phase is Phase.PATCH for item in _finder.waiting.get(module_name, ()))


def waiting_modules(owner: str) -> list[str]:
    """Name the modules that the owner patches once they are imported, and that are not yet."""
    return [name for name in _finder.waiting if name not in sys.modules and waits_for(name, owner)]


def stop_waiting(owner: str) -> None:
    """Forget all that an owner left; the finder goes with the last."""
    for name, waiting in list(_finder.waiting.items()):
        kept = [item for item in waiting if item.owner != owner]
        if kept:
            _finder.waiting[name] = kept
        else:
            del _finder.waiting[name]
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _WaitingFinder:
    """Lets the other finders find the module, and wraps its loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[_Waiting]] = {}
        self.running: set[str] = set()
        """Modules whose callbacks run just now."""
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Some finders ask all others, so this one again: it must not wrap twice.
        if name not in self.waiting or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = self._find_elsewhere(name, path, target)
        finally:
            self._searching.discard(name)
        if spec is None:
            return None
        if spec.loader is None:  # a namespace package: this gives it the loader that it gets anyhow
            importlib.util.module_from_spec(spec)
        spec.loader = _PatchingLoader(spec.loader, self)  # type: ignore[assignment]
        return spec

    def _find_elsewhere(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                return spec
        return None

    def run(self, name: str, module: ModuleType) -> None:
        self.running.add(name)
        try:
            for item in list(self.waiting.get(name, ())):
                with owned_by(item.owner):
                    item.callback(module)
        finally:
            self.running.discard(name)


class _PatchingLoader:
    """In the place of a module's loader for the time of one import."""

    def __init__(self, loader: Any, finder: _WaitingFinder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = create(spec) if create is not None else None
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module's own code, and whoever reads its data files later, find the real loader.
        name = module.__name__
        if module.__spec__ is not None:
            name = module.__spec__.name
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        before = sys.modules.get(name)
        self._loader.exec_module(module)
        after = sys.modules.get(name, module)  # some modules put another object into their place
        # Who runs a module by hand may keep it to himself: the one in sys.modules has its patches.
        is_private = before is not module and after is before
        self._finder.run(name, module if is_private else after)

    def __getattr__(self, name: str) -> Any:
        """Hand through what else a loader can do."""
        return getattr(self._loader, name)


_finder = _WaitingFinder()
