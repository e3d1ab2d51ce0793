"""Find who holds an object under a name of its own: modules that took it by from-import.

Looked at are the names of every module, the attributes of their classes, and what these hold in their own turn, one
level deep: entries of registries, attributes of instances, arguments of partials, default arguments and closures of
functions. What a subclass inherits is not looked at: a replacement often is a subclass itself. Flags such as ``True``,
and modules, have no references.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

from verl_engine.contract.errors import PatchError

_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Most names hold one of these; they hold nothing."""
_NO_IDENTITY: Final = (*_PLAIN, tuple, frozenset, ModuleType)
_CACHED: Final = type(functools.lru_cache(len))
_LARGEST: Final = 10_000
"""Entries of a container that is looked through; a larger one is data."""


class Reference(NamedTuple):
    """One place that holds an object."""

    held: object
    """The object; the function inside where it is a static or class method."""
    module: str
    place: str
    put: Callable[[object], None]

    def __str__(self) -> str:
        return f"{self.module}:{self.place}"

    def replace(self, value: object) -> None:
        """Put something else there; a PatchError where the place cannot be changed."""
        try:
            self.put(value)
        except (AttributeError, TypeError) as error:
            raise PatchError(f"{self} cannot be changed: {error}") from error


def find_references(
    objects: Iterable[object], holders: Iterable[object] = (), modules: Iterable[str] | None = None
) -> list[Reference]:
    """Search modules, by default all, for the places that hold one of these objects; in the order of ``sys.modules``.

    A static or class method stands for the function inside as well. What holders hold in their own turn does not count.
    """
    wanted = {
        id(same) for thing in objects for same in (thing, inner_function(thing)) if not isinstance(same, _NO_IDENTITY)
    }
    found: list[Reference] = []
    # A script is there twice in a spawned process, and one registry is held by many modules.
    seen = {id(same) for thing in holders for same in (thing, inner_function(thing))}
    chosen = list(sys.modules) if modules is None else modules
    for name in chosen if wanted else ():
        module = sys.modules.get(name)
        names = stored_names(module)
        if module is not None and id(names) not in seen:
            seen.add(id(names))
            found += _Search(name, wanted, seen).names_of(module, names)
    return found


def inner_function(value: object) -> object:
    """The function inside a static or class method."""
    is_wrapper = issubclass(type(value), staticmethod | classmethod)
    return object.__getattribute__(value, "__func__") if is_wrapper else value


def stored_names(holder: object) -> Mapping[str, Any]:
    """Return what a module or class holds, without asking it: some make names, or import, when they are asked."""
    names: Mapping[str, Any] = {}
    with suppress(AttributeError):  # no module at all: anything can be in sys.modules
        names = (type if issubclass(type(holder), type) else object).__getattribute__(holder, "__dict__")
    return names


class _Search(NamedTuple):
    """Looks through one module for things of wanted identities; what was seen is not looked at again."""

    module: str
    wanted: set[int]
    seen: set[int]

    def names_of(self, holder: object, names: Mapping[str, object], prefix: str = "") -> Iterator[Reference]:
        """Look at the names of the module, or of a class of it."""
        for name, value in list(names.items()):
            kind = type(value)
            if kind in _PLAIN or kind is ModuleType:
                continue
            place, inner = f"{prefix}{name}", inner_function(value)
            if id(value) in self.wanted:
                yield Reference(value, self.module, place, partial(setattr, holder, name))
            if inner is not value and id(inner) in self.wanted:
                yield Reference(inner, self.module, place, partial(_set_wrapped, holder, name, kind))
            # By the type alone: some objects respond to isinstance() and getattr() with an import or a warning.
            if issubclass(kind, type):
                members = {} if prefix else stored_names(value)
                if members.get("__module__") == self.module:  # others are looked at where they are defined
                    yield from self.names_of(value, members, f"{place}.")
            elif not name.startswith("__") or type(inner) is FunctionType:
                yield from self._inside(place, inner)

    def _inside(self, place: str, value: object) -> Iterator[Reference]:
        if id(value) in self.seen or (type(value) is FunctionType and value.__module__ != self.module):
            return  # it is looked at where it is defined
        self.seen.add(id(value))
        for label, put, holder, contents in _slots(value):
            for key, held in contents:
                if id(held) in self.wanted:
                    shown = key if type(key) in _PLAIN else ...
                    yield Reference(held, self.module, place + label.format(shown), partial(put, holder, key))


def _slots(value: Any) -> Iterator[tuple[str, Callable[[Any, Any, object], None], Any, Iterable[tuple[Any, object]]]]:
    """Yield what a value holds, one level deep, without asking the value: only its storage is read.

    Returns:
        What to put behind the value's name, a function to replace something, what holds it, and keys with contents.
    """
    kind = type(value)
    if kind is FunctionType:
        yield " (a default argument)", _set_default, value, enumerate(value.__defaults__ or ())
        named = value.__kwdefaults__ or {}
        yield " (a default argument)", dict.__setitem__, named, list(named.items())
        for cell in value.__closure__ or ():
            with suppress(ValueError):  # it may not be filled yet
                yield " (in its closure)", setattr, cell, [("cell_contents", cell.cell_contents)]
    elif kind is partial:
        yield " (in a partial)", _refuse, value, enumerate((value.func, *value.args, *value.keywords.values()))
    elif kind is MethodType:
        yield " (a bound method)", _refuse, value, [("", value.__func__)]
    elif kind is _CACHED:
        yield " (behind a cache)", _refuse, value, [("", stored_names(value).get("__wrapped__"))]
    # A container's methods may be its own: the base's are called.
    elif issubclass(kind, dict):
        yield "[{!r}]", dict.__setitem__, value, list(dict.items(value)) if dict.__len__(value) <= _LARGEST else ()
    elif issubclass(kind, list | tuple | set | frozenset):
        base: Any = next(base for base in (list, tuple, set, frozenset) if issubclass(kind, base))
        entries = enumerate(list(base.__iter__(value)) if base.__len__(value) <= _LARGEST else ())
        yield "[{}]", list.__setitem__ if base is list else _refuse, value, entries
    elif not issubclass(kind, type | ModuleType):
        yield ".{}", setattr, value, list(stored_names(value).items())


def _set_wrapped(holder: object, name: str, wrapper: Any, value: object) -> None:
    setattr(holder, name, value if isinstance(value, wrapper) else wrapper(value))


def _set_default(function: FunctionType, index: int, value: object) -> None:
    values = function.__defaults__ or ()
    function.__defaults__ = (*values[:index], value, *values[index + 1 :])


def _refuse(*_: object) -> None:
    raise TypeError("a tuple, set, partial, cache or bound method keeps what it holds")
