"""Names that can be patched: ``module:attribute`` or ``module:Class.method``, looked at without side effects."""

import inspect
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Final, NamedTuple, Self

from verl_engine.contract.errors import PatchError

ABSENT: Final = object()
"""Stands for a name that is not there."""


class Target(NamedTuple):
    """One name of one module."""

    module: str
    path: str
    """Below the module, with dots."""

    def __str__(self) -> str:
        return f"{self.module}:{self.path}"

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read ``module:attribute``; a PatchError where it is not of this form."""
        module, _, path = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not all(part.isidentifier() for part in (*module.split("."), *path.split("."))):
            raise PatchError(
                f"{text!r} names nothing that can be patched; write 'module:attribute' or 'module:Class.method'"
            )
        return cls(module, path)

    def get(self, module: ModuleType | None = None) -> object:
        """Look up what the name holds, as it is stored: a method without binding, a static method in its wrapper.

        ABSENT where the module, by default the one in ``sys.modules``, is not imported or has no such name.
        """
        return self._follow(self.path.split("."), module)

    def set(self, value: object, module: ModuleType | None = None) -> None:
        """Put something under the name, as it is to be stored; a PatchError where that cannot be done."""
        *owner_path, name = self.path.split(".")
        owner = self._follow(owner_path, module)
        if owner is ABSENT:
            place = f"{self.module}:{'.'.join(owner_path)}".rstrip(":")
            raise PatchError(f"{self} cannot be patched: there is no {place}")
        try:
            setattr(owner, name, value)
        except (AttributeError, TypeError) as error:  # a class written in C, say
            raise PatchError(f"{self} cannot be patched: {type(error).__name__}: {error}") from error

    def _follow(self, names: Iterable[str], module: ModuleType | None) -> object:
        found: object = sys.modules.get(self.module) if module is None else module
        if found is None:
            return ABSENT
        for name in names:
            holder, found = found, inspect.getattr_static(found, name, ABSENT)
            if found is ABSENT and inspect.ismodule(holder):  # modules that make their names at first use
                found = getattr(holder, name, ABSENT)
        return found


def short_repr(value: object) -> str:
    """Show a value in one line: a function or class by where it was defined."""
    inner = getattr(value, "__func__", value)
    name, module = getattr(inner, "__qualname__", None), getattr(inner, "__module__", None)
    if isinstance(name, str) and isinstance(module, str):
        kind = "class" if isinstance(value, type) else "function" if callable(inner) else type(value).__name__
        return f"<{kind} {module}.{name}>"
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return repr(value)[:100]
    return "nothing" if value is ABSENT else f"<{type(value).__module__}.{type(value).__qualname__} object>"
