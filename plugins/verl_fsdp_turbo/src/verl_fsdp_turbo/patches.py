"""Functions that the library replaces for the whole process: once, however many engines are built in it.

The library wraps a function anew with each engine. Wrapped twice, attention would trade tokens for heads twice.
"""

from __future__ import annotations

import copy
import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist

from verl_engine.contract.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator

_FUNCTION_LISTS: Final = ("ulysses_function_patches", "loss_function_patches")

_REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")

_done: dict[str, tuple[str, object]] = {}
"""By dotted path of what was replaced: by what, and the function that stands there since."""


def without_done(values: dict[str, Any]) -> dict[str, Any]:
    """Take out of the library's config what an earlier engine of this process has had replaced already.

    Args:
        values: as `library_config` gives them; unchanged.
    Raises:
        UnsupportedError: an earlier engine had the same function replaced by something else, or somebody undid it.
        ConfigError: a function cannot be found.
    """
    pending = copy.deepcopy(values)
    for target, what in _wanted(values):
        current = _resolve(target)
        if target not in _done:
            continue
        kind, stands = _done[target]
        if kind != what:
            raise UnsupportedError(
                f"an engine of this process had {target} replaced for {kind}, and this one wants {what}; a function "
                "can be replaced once per process. Give each engine a process of its own"
            )
        if current is not stands:
            raise UnsupportedError(
                f"{target} was replaced for {kind} by an earlier engine of this process, and has been changed since; "
                "start a fresh process"
            )
    plan = pending["distributed"].get("cp_plan", {})
    for name in _FUNCTION_LISTS:
        for patch in plan.get(name, ()):
            patch["target_functions"] = [target for target in patch["target_functions"] if target not in _done]
        if name in plan:
            plan[name] = [patch for patch in plan[name] if patch["target_functions"]]
    return pending


def note_done(values: dict[str, Any]) -> None:
    """Remember what was replaced, after the library has done so."""
    for target, what in _wanted(values):
        _done[target] = (what, _resolve(target))


@contextmanager
def keep_reductions() -> Iterator[None]:
    """Undo that the library wraps torch's reductions, once more with each engine that has experts.

    Its wrapper plays an operation that some devices lack, and that this engine does not use; and it waits for all that
    others of the process start asynchronously.
    """
    plain = {name: getattr(dist, name) for name in _REDUCTIONS}
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)


def _wanted(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each function to replace, and by what."""
    plan = values["distributed"].get("cp_plan", {})
    for name in _FUNCTION_LISTS:
        for patch in plan.get(name, ()):
            for target in patch["target_functions"]:
                yield target, patch["type"]
    for patch in values["module_patches"]:
        yield patch["target"], patch["replacement"]


def _resolve(path: str) -> object:
    """Find what a dotted path leads to: a function of a module, or of a class in one."""
    names = path.split(".")
    for split in range(len(names) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(names[:split]))
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise ConfigError(f"{path} cannot be replaced: importing its module failed ({error})") from error
            continue
        for name in names[split:]:
            if not hasattr(found, name):
                raise ConfigError(
                    f"{path} cannot be replaced: there is no {name} in {getattr(found, '__name__', found)}; check the "
                    "path, and the release of transformers"
                )
            found = getattr(found, name)
        return found
    raise ConfigError(f"{path} cannot be replaced: no module of this name can be imported")
