"""Functions that the library replaces in other packages: for the engine that wants them, while that engine runs.

The library replaces them for the whole process, and once more with each engine. So they would change other engines:
attention that was wrapped twice trades tokens for heads twice, and where nobody splits sequences it would trade too.
"""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from verl_engine.contract.errors import ConfigError
from verl_engine.patching.references import stored_names

_FUNCTION_LISTS: Final = ("ulysses_function_patches", "loss_function_patches")
_REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")


class _Name(NamedTuple):
    """One place of a function, with what is there otherwise, and what is there for the engine."""

    holder: object
    name: str
    plain: object
    replaced: object


class Replacements:
    """What one engine has had replaced."""

    def __init__(self) -> None:
        self._names: list[_Name] = []

    @contextmanager
    def recorded(self, values: dict[str, Any]) -> Iterator[None]:
        """Take note of what the library replaces inside, and put back what was there; ConfigError for what is unknown.

        That the library wraps torch's reductions, once more with each engine that has experts, is undone for good: its
        wrapper plays an operation that some devices lack, and that this engine does not use; and it waits for all that
        others of the process start asynchronously.
        """
        for patch in values["module_patches"]:  # or these would take what is replaced before they are imported
            with suppress(ImportError):
                importlib.import_module(patch["replacement"].rpartition(".")[0])
        before = [place for target in _targets(values) for place in _places(*_find(target))]
        reductions = {name: getattr(dist, name) for name in _REDUCTIONS}
        try:
            yield
        finally:
            for name, function in reductions.items():
                setattr(dist, name, function)
            for holder, name, plain in before:
                replaced = inspect.getattr_static(holder, name)
                if replaced is not plain:
                    self._names.append(_Name(holder, name, plain, replaced))
            _put((each, each.plain) for each in self._names)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Put the replacements in place inside; harmless where they are."""
        before = [(each, inspect.getattr_static(each.holder, each.name)) for each in self._names]
        _put((each, each.replaced) for each in self._names)
        try:
            yield
        finally:
            _put(before)


def _put(values: Iterable[tuple[_Name, object]]) -> None:
    for each, value in values:
        setattr(each.holder, each.name, value)


def _targets(values: dict[str, Any]) -> Iterator[str]:
    """Yield each function that is to be replaced."""
    plan = values["distributed"].get("cp_plan", {})
    for name in _FUNCTION_LISTS:
        for patch in plan.get(name, ()):
            yield from patch["target_functions"]
    for patch in values["module_patches"]:
        yield patch["target"]


def _places(holder: object, name: str) -> Iterator[tuple[object, str, object]]:
    """Yield where the library may replace a function, and the function: in its class, or under any name of a module."""
    plain = inspect.getattr_static(holder, name)
    yield holder, name, plain
    if isinstance(holder, type):
        yield from ((base, name, plain) for base in holder.__mro__[1:] if vars(base).get(name) is plain)
        return
    for module in list(sys.modules.values()):
        for other, value in list(stored_names(module).items()):
            if value is plain and (module, other) != (holder, name):
                yield module, other, plain


def _find(path: str) -> tuple[object, str]:
    """Find what holds the function that a dotted path leads to, a module or a class in one, and its name there."""
    names = path.split(".")
    for split in range(len(names) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:split]))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise ConfigError(f"{path} cannot be replaced: importing its module failed ({error})") from error
            continue
        holder = found
        for name in names[split:]:
            if not hasattr(found, name):
                raise ConfigError(
                    f"{path} cannot be replaced: there is no {name} in {getattr(found, '__name__', found)}; check the "
                    "path, and the release of transformers"
                )
            holder, found = found, getattr(found, name)
        return holder, names[-1]
    raise ConfigError(f"{path} cannot be replaced: no module of this name can be imported")
