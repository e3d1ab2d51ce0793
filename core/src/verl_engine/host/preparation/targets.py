"""Names that can be patched: ``module:attribute`` or ``module:Class.method``, looked at without side effects."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from verl_engine.contract.errors import PatchError

if TYPE_CHECKING:
    from types import ModuleType

ABSENT: Final = object()
"""Stands for a name that is not there."""


class Target(NamedTuple):
    """One name of one module."""

    module: str
    path: str
    """Below the module, with dots."""

    def __str__(self) -> str:
        """Write it as plugins do."""
        return f"{self.module}:{self.path}"

    @classmethod
    def parse(cls, text: object) -> Target:
        """Read ``module:attribute``.

        Raises:
            PatchError: it is not of this form.
        """
        module, _, path = text.partition(":") if isinstance(text, str) else ("", "", "")
        parts = [*module.split("."), *path.split(".")]
        if not all(part.isidentifier() for part in parts):
            raise PatchError(
                f"{text!r} names nothing that can be patched; write 'module:attribute' or 'module:Class.method'"
            )
        return cls(module, path)

    def get(self) -> object:
        """Look up what the name holds, as it is stored: a method without binding, a static method in its wrapper.

        Returns:
            ABSENT where the module is not imported, or has no such name.
        """
        module = sys.modules.get(self.module)
        return ABSENT if module is None else self.get_in(module)

    def get_in(self, module: ModuleType) -> object:
        """As `get`, in a module that is perhaps not in ``sys.modules`` yet."""
        found: object = module
        for name in self.path.split("."):
            found = _stored(found, name)
            if found is ABSENT:
                return ABSENT
        return found

    def set(self, value: object) -> None:
        """Put something under the name; ABSENT removes it.

        Raises:
            PatchError: there is no such module or class, or it cannot be changed.
        """
        self.set_in(sys.modules.get(self.module), value)

    def set_in(self, module: ModuleType | None, value: object) -> None:
        """As `set`, in a module that is perhaps not in ``sys.modules``."""
        owner_path, _, name = self.path.rpartition(".")
        owner: object = module
        if module is not None and owner_path:
            owner = Target(self.module, owner_path).get_in(module)
        if owner is None or owner is ABSENT:
            raise PatchError(
                f"{self} cannot be patched: there is no {self.module}{f':{owner_path}' * bool(owner_path)}"
            )
        try:
            if value is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        except (AttributeError, TypeError) as error:  # a class written in C, say
            raise PatchError(f"{self} cannot be patched: {type(error).__name__}: {error}") from error


def _stored(holder: object, name: str) -> object:
    found: object = inspect.getattr_static(holder, name, ABSENT)
    if found is ABSENT and inspect.ismodule(holder):  # modules that make their names at first use
        found = getattr(holder, name, ABSENT)
    return found


def short_repr(value: object) -> str:
    """Show a value in one line: a function or class by where it was defined."""
    if value is ABSENT:
        return "nothing"
    inner = getattr(value, "__func__", value)
    name, module = getattr(inner, "__qualname__", None), getattr(inner, "__module__", None)
    if isinstance(name, str) and isinstance(module, str):
        kind = "class" if isinstance(value, type) else "function" if callable(inner) else type(value).__name__
        return f"<{kind} {module}.{name}>"
    if value is None or isinstance(value, bool | int | float | str | tuple):
        return repr(value)[:100]
    return f"<{type(value).__module__}.{type(value).__qualname__} object>"
