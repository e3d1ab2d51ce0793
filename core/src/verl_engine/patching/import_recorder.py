"""Who imported a module: seen from the moment a backend is loaded that must precede it; before, only who holds it."""

import os
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Final

from verl_engine.patching.first_import import owner
from verl_engine.patching.references import stored_names

_MACHINERY: Final = ("importlib", "_frozen_importlib", "verl_engine.patching.")
"""How the names of modules begin whose code only hands an import on."""
_MOST_NAMED: Final = 5


class _Recorder:
    """A finder that finds no module itself: Python asks every finder in turn. A forked child has its parent's."""

    def __init__(self) -> None:
        self.roots: set[str] = set()
        self.importers: dict[str, tuple[str, str]] = {}
        """Module, the place in the code that imported it first, and the backend that was at work then."""
        self.parent: int | None = None
        """The process that this one was forked from, if core was imported there already."""
        self.inherited: frozenset[str] = frozenset()
        """What was imported at the fork."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - Python's
        if name in sys.modules or not (owner.get()[0] or any(is_within(name, root) for root in self.roots)):
            return
        frame = sys._getframe(1)  # noqa: SLF001 - the only way to ask who called
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_MACHINERY):
            frame = frame.f_back
        # Asking whether it is there, by importlib.util.find_spec, is no import; a real one comes later and corrects it.
        importer = frame.f_globals.get("__name__", "code")
        self.importers[name] = f"{importer} ({frame.f_code.co_filename}, line {frame.f_lineno})", owner.get()[0]

    def note_fork(self) -> None:
        self.parent, self.inherited = os.getppid(), frozenset(sys.modules)


_recorder = _Recorder()
os.register_at_fork(after_in_child=_recorder.note_fork)


def is_within(name: str, root: str) -> bool:
    """Whether a module is ``root`` or below it."""
    return name == root or name.startswith(f"{root}.")


def record_imports(roots: Iterable[str]) -> None:
    """Remember from now on who imports any of these modules, or one below, and whatever a backend at work imports."""
    _recorder.roots.update(roots)
    if _recorder not in sys.meta_path:
        sys.meta_path.insert(0, _recorder)


def explain_import(root: str) -> str:
    """Say who imported a module, or one below it, and what to do so that it is imported later; empty if nobody did."""
    # An entry of None is a name that nobody may import.
    found = [name for name in list(sys.modules) if is_within(name, root) and sys.modules.get(name) is not None]
    if not found:
        return ""
    name = root if root in found else found[0]
    importer, backend = _recorder.importers.get(name, ("", ""))
    who = f"{name} is there already, imported "
    who += f"by {importer}" if importer else f"before this backend was loaded; {_describe_holders(name)}"
    fork = _explain_fork(name)
    if fork:
        return f"{who}. {fork}: start this process by spawn or forkserver, or fork before the import"
    if backend:
        return (
            f"{who}, while {backend} was prepared or created in this process. The two cannot share a process in this "
            "order: prepare this backend first, or give each a process of its own"
        )
    return f"{who}. Import it later, or start this backend in a process that does not import it"


def _describe_holders(root: str) -> str:
    """Name the modules that hold one, or a class or function that was defined in it or below."""
    modules = {name: list(stored_names(module).values()) for name, module in list(sys.modules.items())}
    modules.pop("__mp_main__", None)  # what multiprocessing calls __main__, too
    holders = [name for name, held in modules.items() if any(_is_from(value, root) for value in held)]
    holders = [name for name in holders if not is_within(name, root)]
    if not holders:
        return "no module holds it, so a function, exec() or compiled code did it"
    more = f" and {len(holders) - _MOST_NAMED} more" if len(holders) > _MOST_NAMED else ""
    return f"held by {', '.join(holders[:_MOST_NAMED])}{more}"


def _is_from(value: object, root: str) -> bool:
    """By type and storage alone: some objects import something when they are asked."""
    names = stored_names(value)
    is_module = issubclass(type(value), ModuleType)
    home = value.__module__ if type(value) is FunctionType else names.get("__name__" if is_module else "__module__")
    return isinstance(home, str) and is_within(home, root)


def _explain_fork(name: str) -> str:
    """Say that a forked child has a module from its parent; empty where it has not, or where none can tell."""
    if name in _recorder.inherited:
        return f"This process has it from its parent, process {_recorder.parent}, which imported it before the fork"
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing and multiprocessing.parent_process()
    # Core was not imported yet when multiprocessing forked; spawn leaves a mark.
    if _recorder.parent is None and parent and "--multiprocessing-fork" not in sys.orig_argv:
        return f"This process was forked by process {parent.pid}, which probably imported it before the fork"
    return ""
