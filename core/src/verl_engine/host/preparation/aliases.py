"""Find who holds an object under a name of its own: modules that took it by from-import.

Looked at are the names of every module, the attributes of their classes, and default arguments of their functions and
methods. What a subclass inherits from a class is not: a replacement often is a subclass itself. Flags such as ``True``
cannot be told apart by identity and have no aliases.
"""

from __future__ import annotations

import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_engine.contract.errors import PatchError
from verl_engine.host.preparation.module_source import stored_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_NO_IDENTITY = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)


class Alias(NamedTuple):
    """One place that holds an object."""

    held: object
    """The object; the function inside where it is a static or class method."""
    module: str
    place: str
    replace: Callable[[object], None]
    """Puts something else there."""

    def __str__(self) -> str:
        """Show the place as messages do."""
        return f"{self.module}:{self.place}"


def find_aliases(objects: Iterable[object]) -> list[Alias]:
    """Search all modules of this process for the places that hold one of these objects.

    Args:
        objects: a static or class method stands for the function inside as well.
    Returns:
        The places, in the order of ``sys.modules``.
    """
    wanted = {
        id(same) for thing in objects for same in (thing, inner_function(thing)) if not isinstance(same, _NO_IDENTITY)
    }
    found: list[Alias] = []
    seen: set[int] = set()  # a script is there twice in a spawned process
    for name, module in list(sys.modules.items()) if wanted else ():
        names = stored_names(module)
        if id(names) not in seen:
            seen.add(id(names))
            found += [alias for alias in _places(name, module, names) if id(alias.held) in wanted]
    return found


def inner_function(value: object) -> object:
    """The function inside a static or class method."""
    is_wrapper = issubclass(type(value), staticmethod | classmethod)
    return object.__getattribute__(value, "__func__") if is_wrapper else value


def _places(module_name: str, module: object, names: Mapping[str, object]) -> Iterator[Alias]:
    for name, value in list(names.items()):
        yield Alias(value, module_name, name, _attribute_setter(module, name))
        # By the type alone: some objects answer isinstance() and getattr() with an import or a warning.
        if (
            type(value) is FunctionType and value.__module__ == module_name
        ):  # others are looked at where they are defined
            yield from _defaults(module_name, name, value)
        elif issubclass(type(value), type):
            attributes = stored_names(value)
            if attributes.get("__module__") != module_name:
                continue
            for attribute, member in list(attributes.items()):
                place, inner = f"{name}.{attribute}", inner_function(member)
                wrapper = type(member) if inner is not member else None
                yield Alias(member, module_name, place, _attribute_setter(value, attribute))
                if wrapper is not None:
                    yield Alias(inner, module_name, place, _attribute_setter(value, attribute, wrapper))
                if type(inner) is FunctionType:
                    yield from _defaults(module_name, place, inner)


def _defaults(module: str, place: str, function: FunctionType) -> Iterator[Alias]:
    label = f"{place} (a default argument)"
    for index, value in enumerate(function.__defaults__ or ()):
        yield Alias(value, module, label, _default_setter(function, index))
    for name, value in (function.__kwdefaults__ or {}).items():
        yield Alias(value, module, label, _default_setter(function, name))


def _attribute_setter(holder: object, name: str, wrapper: type[Any] | None = None) -> Callable[[object], None]:
    def replace(value: object) -> None:
        try:
            setattr(holder, name, value if wrapper is None or isinstance(value, wrapper) else wrapper(value))
        except (AttributeError, TypeError) as error:
            raise PatchError(f"{name} of {holder!r} cannot be changed: {error}") from error

    return replace


def _default_setter(function: FunctionType, key: int | str) -> Callable[[object], None]:
    def replace(value: object) -> None:
        if isinstance(key, str):
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), key: value}
        else:
            values = function.__defaults__ or ()
            function.__defaults__ = (*values[:key], value, *values[key + 1 :])

    return replace
