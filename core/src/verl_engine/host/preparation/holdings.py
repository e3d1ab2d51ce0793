"""What a value holds in its own turn: entries of a registry, arguments of a partial, variables of a closure."""

from __future__ import annotations

import functools
from types import CellType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from verl_engine.contract.errors import PatchError
from verl_engine.host.preparation.module_source import stored_names

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

_LARGEST: Final = 10_000
"""Entries of a container that is looked through; a larger one is data."""
_PLAIN: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Most names hold one of these; they hold nothing."""
_BINDINGS: Final[Mapping[type, tuple[str, Callable[[Any], Iterable[object]]]]] = {
    functools.partial: (" (in a partial)", lambda value: (value.func, *value.args, *value.keywords.values())),
    MethodType: (" (a bound method)", lambda value: (value.__func__,)),
    type(functools.lru_cache(len)): (" (behind a cache)", lambda value: (stored_names(value).get("__wrapped__"),)),
}
"""What hands calls on, and a way to what it holds; none can be changed."""


class Holding(NamedTuple):
    """One thing that a value holds."""

    held: object
    place: str
    """To be put behind the value's own name."""
    replace: Callable[[object], None]


def attribute_setter(holder: object, name: str, wrapper: type[Any] | None = None) -> Callable[[object], None]:
    """Make a function that sets an attribute, wrapped as a static or class method if need be."""

    def replace(value: object) -> None:
        try:
            setattr(holder, name, value if wrapper is None or isinstance(value, wrapper) else wrapper(value))
        except (AttributeError, TypeError) as error:
            raise PatchError(f"{name} of {holder!r} cannot be changed: {error}") from error

    return replace


def holdings(value: object, wanted: Container[int]) -> Iterator[Holding]:
    """Yield what a value holds, one level deep, without asking the value: only its storage is read.

    Args:
        value: anything.
        wanted: identities of the things that are looked for; making all others known would take too long.
    """
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind is FunctionType:
        yield from _defaults_and_closure(value, wanted)  # type: ignore[arg-type]
    elif issubclass(kind, dict):
        entries: Any = value  # its methods may be its own: dict's are called
        for key, entry in list(dict.items(entries)) if dict.__len__(entries) <= _LARGEST else ():
            if id(entry) in wanted:
                yield Holding(entry, f"[{key!r}]" if type(key) in _PLAIN else "[…]", _entry_setter(dict, value, key))
    elif issubclass(kind, list | tuple | set | frozenset):
        yield from _elements(
            value, next(base for base in (list, tuple, set, frozenset) if issubclass(kind, base)), wanted
        )
    elif kind in _BINDINGS:
        label, parts = _BINDINGS[kind]
        yield from (Holding(held, label, _refuse) for held in parts(value) if id(held) in wanted)
    elif not issubclass(kind, type | ModuleType):
        for name, held in list(stored_names(value).items()):
            if id(held) in wanted:
                yield Holding(held, f".{name}", attribute_setter(value, name))


def _elements(value: Any, base: Any, wanted: Container[int]) -> Iterator[Holding]:
    if base.__len__(value) > _LARGEST:
        return
    for index, entry in enumerate(list(base.__iter__(value))):
        if id(entry) in wanted:
            yield Holding(entry, f"[{index}]", _entry_setter(list, value, index) if base is list else _refuse)


def _defaults_and_closure(function: FunctionType, wanted: Container[int]) -> Iterator[Holding]:
    for index, value in enumerate(function.__defaults__ or ()):
        if id(value) in wanted:
            yield Holding(value, " (a default argument)", _default_setter(function, index))
    for name, value in (function.__kwdefaults__ or {}).items():
        if id(value) in wanted:
            yield Holding(value, " (a default argument)", _default_setter(function, name))
    for cell in function.__closure__ or ():
        content = _content(cell)
        if id(content) in wanted:
            yield Holding(content, " (in its closure)", _cell_setter(cell))


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _entry_setter(base: Any, container: object, key: object) -> Callable[[object], None]:
    def replace(value: object) -> None:
        base.__setitem__(container, key, value)

    return replace


def _cell_setter(cell: CellType) -> Callable[[object], None]:
    def replace(value: object) -> None:
        cell.cell_contents = value

    return replace


def _default_setter(function: FunctionType, key: int | str) -> Callable[[object], None]:
    def replace(value: object) -> None:
        if isinstance(key, str):
            function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), key: value}
        else:
            values = function.__defaults__ or ()
            function.__defaults__ = (*values[:key], value, *values[key + 1 :])

    return replace


def _refuse(_: object) -> None:
    raise PatchError("what a tuple, set, partial, cache or bound method holds cannot be changed")
