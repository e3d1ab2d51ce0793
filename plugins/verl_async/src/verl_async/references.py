"""Classes and functions that a job names: a built-in one by its name, a user's as ``module:attribute``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_engine.contract.config_file import validate
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.strict_model import StrictModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


def split_reference(text: str) -> tuple[str, str]:
    """Return the module and what is in it, such as ``my_rewards`` and ``score`` of ``my_rewards:score``.

    Raises:
        ValueError: it is neither ``module:attribute`` nor a dotted path.
    """
    module, colon, attribute = text.partition(":")
    if not colon:
        module, _, attribute = text.rpartition(".")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ValueError("must be module:attribute or a dotted path, such as my_rewards:score")
    return module, attribute


def known_or_reference(text: str, built_in: Iterable[str]) -> str:
    """Return a name as it is; for validating a field.

    Raises:
        ValueError: it is neither built in nor `split_reference` takes it.
    """
    names = list(built_in)
    if text not in names:
        try:
            split_reference(text)
        except ValueError as error:
            close = difflib.get_close_matches(text, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"must be {', '.join(names)}, or {str(error).removeprefix('must be ')}{hint}") from None
    return text


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a job names, imported and made."""

    made: Any
    settings: dict[str, Any]
    """Plain values, defaults included."""
    path: str
    """File of its module, or folder of its outermost package: what other processes need."""


def load(name: str, built_in: Mapping[str, str], settings: Mapping[str, Any], at: str) -> Loaded:
    """Import what a job names and make it, in this process.

    Args:
        name: built in, or a reference.
        built_in: references by name.
        settings: for its ``Config``.
        at: dotted path of the field that names it; its settings are in the one that ends in ``_config``.
    Raises:
        ConfigError: as `load_reference` and `make`.
    """
    place, reference = f"{at}={name}", built_in.get(name, name)
    found = load_reference(reference, place, at.rpartition(".")[2])
    made = make(found, settings, place, f"{at}_config")
    config = validated(found, settings, place, f"{at}_config")
    return Loaded(made, {} if config is None else config.model_dump(mode="json"), _path_of(reference))


def _path_of(reference: str) -> str:
    top = sys.modules[split_reference(reference)[0].partition(".")[0]]
    paths = [top.__file__] if getattr(top, "__file__", None) else list(getattr(top, "__path__", []))
    path = Path(paths[0] or "").absolute()
    return str(path.parent if path.name.startswith("__init__.") else path)


def load_reference(text: str, place: str, expected: str) -> object:
    """Import what a job names.

    Args:
        text: as `split_reference` takes it.
        place: setting and value, such as ``reward.function=my_rewards:score``; how each message begins.
        expected: what it should be, such as ``function``; for messages.
    Raises:
        ConfigError: its module cannot be imported (the cause is chained), or has nothing of that name.
    """
    module, attribute = split_reference(text)
    found = _import(module, place)
    for name in attribute.split("."):
        found = getattr(found, name, None)
    if not callable(found):
        raise ConfigError(
            f"{place}: module {module} has no {expected} {attribute!r}; define it there, or correct the path"
        )
    return found


def make(found: object, settings: Mapping[str, Any], place: str, at: str) -> object:
    """Return what a job calls: a function as it is, of a class an object made with its validated settings.

    Args:
        found: of `load_reference`. A class with a ``Config``, a `StrictModel`, is called with one; another without
            arguments.
        settings: of the job, for the class's ``Config``.
        place: setting and value that named it.
        at: dotted path of its settings.
    Raises:
        ConfigError: a setting is wrong (all faults in one message), nothing takes the settings, or making it failed.
    """
    config = validated(found, settings, place, at)
    if not isinstance(found, type):
        return found
    try:
        return found() if config is None else found(config)
    except ConfigError:  # it says itself which setting is at fault
        raise
    except Exception as error:
        raise ConfigError(f"{place}: cannot be made: {type(error).__name__}: {error}") from error


def validated(found: object, settings: Mapping[str, Any], place: str, at: str) -> StrictModel | None:
    """Return the settings of what a job names, defaults included; None where it has none. As `make`."""
    config_class = getattr(found, "Config", None) if isinstance(found, type) else None
    if config_class is None:
        if settings:
            raise ConfigError(
                f"{at}={dict(settings)}: {place} takes no settings; only a class with a Config (a StrictModel) does"
            )
        return None
    if not (isinstance(config_class, type) and issubclass(config_class, StrictModel)):
        raise ConfigError(
            f"{place}: its Config is no StrictModel; derive it from verl_engine's (contract.strict_model)"
        )
    return validate(config_class, settings, at)


def _import(module_name: str, place: str) -> object:
    # A console script does not look into the current folder, where users keep their functions. For good and last: the
    # module may import its neighbours later, and must not hide an installed package.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except SystemExit as error:
        raise ConfigError(
            f"{place}: module {module_name}{_file_of(module_name)} cannot be imported: it calls "
            f"sys.exit({error.code!r}); put what it does as a script under `if __name__ == '__main__':`"
        ) from error
    except BaseException as error:
        raise ConfigError(
            f"{place}: module {module_name}{_file_of(module_name)} cannot be imported ({type(error).__name__}: "
            f"{error}); install it, or put it into the current folder {folder}"
        ) from error


def _file_of(module_name: str) -> str:
    """Name the file of a module that could not be imported, in brackets, where there is one."""
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception:  # noqa: BLE001 - finding a module may run its package
        return ""
    return f" ({spec.origin})" if spec is not None and spec.origin else ""
