"""See who imports certain modules first: from the moment a backend is loaded that must precede them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from verl_engine.host.preparation.import_sites import ImportSite, is_within

if TYPE_CHECKING:
    from collections.abc import Iterable

_IMPORT_MACHINERY: Final = ("importlib", "importlib.util", "importlib._bootstrap", "_frozen_importlib")


def watch_for_imports(roots: Iterable[str]) -> None:
    """Remember from now on who imports any of these modules, or one below, for the first time."""
    _witness.roots |= set(roots)
    if _witness.roots and _witness not in sys.meta_path:
        sys.meta_path.insert(0, _witness)


def seen_importer(name: str) -> ImportSite | None:
    """Return who was seen to import a module first, if it was watched for."""
    return _witness.seen.get(name)


class _Witness:
    """Finds no module itself: Python asks every finder in turn."""

    def __init__(self) -> None:
        self.roots: set[str] = set()
        self.seen: dict[str, ImportSite] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:  # noqa: ARG002 - Python's
        if name in sys.modules or not any(is_within(name, root) for root in self.roots):
            return
        frame = sys._getframe(1)  # noqa: SLF001 - the only way to ask who called
        while frame.f_back is not None and frame.f_globals.get("__name__") in _IMPORT_MACHINERY:
            frame = frame.f_back
        # Asking whether it is there, by importlib.util.find_spec, is no import; a real one comes later and corrects it.
        self.seen[name] = ImportSite(frame.f_globals.get("__name__", "code"), frame.f_code.co_filename, frame.f_lineno)


_witness = _Witness()
