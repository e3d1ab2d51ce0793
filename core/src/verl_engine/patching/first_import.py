"""Run something right after a module's import, before its importer goes on: so no code sees the module without it.

One finder in front of ``sys.meta_path`` waits for the modules by name, also after the first import: a reload makes the
module anew and undoes what was done to it.
"""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Literal

from verl_engine.contract.errors import PatchError

How = Literal["preparation", "first import"]
BEFORE, PATCH, AFTER = range(3)
"""In which order things run after an import: the originals are looked at, patched, and the patches are checked."""
owner: ContextVar[tuple[str, How]] = ContextVar("owner", default=("", "first import"))
"""The backend that prepares or creates just now, or whose callback runs, if any; and how it patches."""


@contextmanager
def owned_by(label: str, how: How | None = None) -> Iterator[None]:
    """Let a backend be the owner meanwhile; without ``how`` it patches in the way of the code around."""
    token = owner.set((label, how or owner.get()[1]))
    try:
        yield
    finally:
        owner.reset(token)


def patch_on_import(module_name: str, callback: Callable[[ModuleType], None], *, phase: int = PATCH) -> None:
    """Run ``callback(module)`` right after the module's first import, and after each that follows, such as a reload.

    For ``engine_prepare_process``: a backend that patches so needs not import its framework there, and nobody can take
    a name from the module before it is patched, whoever imports it first. Where the module is imported already, the
    callback runs at once; a backend that would then be too late also says so in ``BackendSpec.must_precede``. Other
    phases are the host's.

    An exception of the callback makes the import fail, so the module is never there half patched.
    Raises:
        PatchError: the module is just being imported: whoever imports it is calling this.
    """
    module = sys.modules.get(module_name)
    if module is not None:
        if module_name in _finder.running:  # asked for by a callback of this same import, which asks at each
            callback(module)
            return
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            raise PatchError(f"{module_name} is just being imported: too late to wait for it, too early to patch it")
        callback(module)
    waiting = _finder.waiting.setdefault(module_name, [])
    waiting.append((phase, owner.get()[0], callback))
    waiting.sort(key=lambda item: item[0])  # stable: within a phase in the order of registration
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def waiting_modules(label: str) -> list[str]:
    """Name the modules that a backend patches once they are imported, and that are not yet."""
    mine = [name for name, items in _finder.waiting.items() if (PATCH, label) in (item[:2] for item in items)]
    return [name for name in mine if name not in sys.modules]


def stop_waiting(label: str) -> None:
    """Forget all that a backend left; the finder goes with the last."""
    for name, items in list(_finder.waiting.items()):
        _finder.waiting[name] = [item for item in items if item[1] != label]
        if not _finder.waiting[name]:
            del _finder.waiting[name]
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _WaitingFinder:
    """Lets the other finders find the module, and wraps its loader."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[int, str, Callable[[ModuleType], None]]]] = {}
        """Phase, owner and callback, for each module."""
        self.running: set[str] = set()
        """Modules whose callbacks run just now."""
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        # Some finders ask all others, so this one again: it must not wrap twice.
        if name not in self.waiting or name in self._searching:
            return None
        self._searching.add(name)
        try:
            others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
            finds = [finder.find_spec for finder in others if hasattr(finder, "find_spec")]
            spec: ModuleSpec | None = next(filter(None, (find(name, path, target) for find in finds)), None)
        finally:
            self._searching.discard(name)
        if spec is not None:
            if spec.loader is None:  # a namespace package: this gives it the loader that it gets anyhow
                importlib.util.module_from_spec(spec)
            spec.loader = _PatchingLoader(spec)  # type: ignore[assignment]
        return spec


_finder = _WaitingFinder()


class _PatchingLoader:
    """In the place of a module's loader for the time of one import; what else a loader can do is handed through."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._spec = spec
        self._loader: Any = spec.loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        # The module's own code, and whoever reads its data files later, find the real loader.
        self._spec.loader = module.__loader__ = self._loader
        name = self._spec.name
        before = sys.modules.get(name)
        self._loader.exec_module(module)
        after = sys.modules.get(name, module)  # some modules put another object into their place
        # Code that runs a module by hand may keep it private; the one in sys.modules is patched.
        is_private = before is not module and after is before
        _finder.running.add(name)
        try:
            for _, label, callback in list(_finder.waiting.get(name, ())):
                with owned_by(label):
                    callback(module if is_private else after)
        finally:
            _finder.running.discard(name)
