"""Find who holds an object under a name of its own: modules that took it by from-import.

Looked at are the names of every module, the attributes of their classes, and what these hold in their own turn, one
level deep: entries of registries, attributes of instances, arguments of partials, default arguments and closures of
functions. What lies deeper, or in an object that no module knows, is not found. What a subclass inherits from a class
is not looked at: a replacement often is a subclass itself. Flags such as ``True`` cannot be told apart by identity and
have no aliases; nor has a module: whoever imports it holds it, and means it.
"""

from __future__ import annotations

import sys
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

from verl_engine.host.preparation.holdings import attribute_setter, holdings
from verl_engine.host.preparation.module_source import stored_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_NO_IDENTITY = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, ModuleType)


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


def find_aliases(
    objects: Iterable[object], holders: Iterable[object] = (), modules: Iterable[str] | None = None
) -> list[Alias]:
    """Search modules of this process for the places that hold one of these objects.

    Args:
        objects: a static or class method stands for the function inside as well.
        holders: what may hold them in its own turn, such as replacements that call the originals.
        modules: names in ``sys.modules``; by default all.
    Returns:
        The places, in the order of ``sys.modules``.
    """
    wanted = {
        id(same) for thing in objects for same in (thing, inner_function(thing)) if not isinstance(same, _NO_IDENTITY)
    }
    found: list[Alias] = []
    # A script is there twice in a spawned process, and one registry is known to many modules.
    seen = {id(same) for thing in holders for same in (thing, inner_function(thing))}
    chosen = list(sys.modules) if modules is None else modules
    for name in chosen if wanted else ():
        module = sys.modules.get(name)
        names = stored_names(module)
        if module is not None and id(names) not in seen:
            seen.add(id(names))
            found += _Search(name, wanted, seen).places(module, names)
    return found


def inner_function(value: object) -> object:
    """The function inside a static or class method."""
    is_wrapper = issubclass(type(value), staticmethod | classmethod)
    return object.__getattribute__(value, "__func__") if is_wrapper else value


class _Search:
    """Looks through one module."""

    def __init__(self, module: str, wanted: set[int], seen: set[int]) -> None:
        self._module = module
        self._wanted = wanted
        self._seen = seen

    def places(self, module: object, names: Mapping[str, object]) -> Iterator[Alias]:
        for name, value in list(names.items()):
            if id(value) in self._wanted:
                yield Alias(value, self._module, name, attribute_setter(module, name))
            # By the type alone: some objects answer isinstance() and getattr() with an import or a warning.
            if issubclass(type(value), type):
                attributes = stored_names(value)
                if attributes.get("__module__") == self._module:  # others are looked at where they are defined
                    yield from self._members(name, value, attributes)
            elif not name.startswith("__"):
                yield from self._inside(name, value)

    def _members(self, owner_name: str, owner: object, attributes: Mapping[str, object]) -> Iterator[Alias]:
        for name, member in list(attributes.items()):
            place, inner = f"{owner_name}.{name}", inner_function(member)
            if id(member) in self._wanted:
                yield Alias(member, self._module, place, attribute_setter(owner, name))
            if inner is not member and id(inner) in self._wanted:
                yield Alias(inner, self._module, place, attribute_setter(owner, name, type(member)))
            if type(inner) is FunctionType or not name.startswith("__"):
                yield from self._inside(place, inner)

    def _inside(self, place: str, value: object) -> Iterator[Alias]:
        if type(value) is FunctionType and value.__module__ != self._module:
            return  # it is looked at where it is defined
        if id(value) not in self._seen:
            self._seen.add(id(value))
            for holding in holdings(value, self._wanted):
                yield Alias(holding.held, self._module, f"{place}{holding.place}", holding.replace)
