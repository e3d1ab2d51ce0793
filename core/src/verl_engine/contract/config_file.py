"""Read a job's YAML file, with dotted overrides from the command line."""

from __future__ import annotations

import difflib
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import validate

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["read_config", "read_overrides", "validate"]


def read_config(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a YAML file, apply overrides in order, and resolve interpolations such as ``${data.seed}``.

    Args:
        path: the YAML file; its top level is a mapping.
        overrides: ``dotted.key=value`` each; the value is YAML, so ``x=null``, ``x=1e-4`` and ``x=[1, 2]`` work.
            Sections that the file leaves out are made.
    Returns:
        Plain dicts, lists and scalars.
    Raises:
        ConfigError: the file is missing or no YAML mapping, an override cannot be applied, or an interpolation
            cannot be resolved.
    """
    file = Path(path)
    data = _read_yaml(file)
    for override in overrides:
        _apply(data, override)
    return _resolve(data, file)


def read_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """Make a mapping of ``dotted.key=value`` texts alone, as `read_config` reads them.

    Raises:
        ConfigError: one cannot be applied.
    """
    data: dict[str, Any] = {}
    for override in overrides:
        _apply(data, override)
    return data


def _read_yaml(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"config file {file} {'is a folder' if file.is_dir() else 'does not exist'}{_similar(file)}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} cannot be read as UTF-8 text: {error}") from error
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, yaml.MappingNode | None):
            kind = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
            raise ConfigError(
                f"{file}: the top level is {kind}, but must be a mapping of sections (`model:`, `engine:` …)"
            )
        # OmegaConf's loader, unlike plain PyYAML, refuses a key given twice and reads 1e-4 as a number.
        loaded = OmegaConf.to_container(OmegaConf.load(StringIO(text)), resolve=False)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{_place(file, error)}: not valid YAML: {_yaml_problem(error)}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{file}: {_first_line(error)}") from error
    return cast("dict[str, Any]", loaded)


def _similar(file: Path) -> str:
    """Say which neighbour was probably meant."""
    if not file.parent.is_dir():
        return f"; the folder {file.parent} does not exist either"
    neighbours = [other.name for other in file.parent.iterdir() if other.suffix in {".yaml", ".yml"}]
    close = difflib.get_close_matches(file.name, neighbours, n=1)
    return f"; did you mean {file.parent / close[0]}?" if close else ""


def _place(file: Path, error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    return str(file) if mark is None else f"{file}, line {mark.line + 1}, column {mark.column + 1}"


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    return " ".join(part for part in (error.context, error.problem) if part)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _apply(data: dict[str, Any], override: str) -> None:
    """Set one ``dotted.key=value`` in place."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals:
        raise ConfigError(f"override {override!r} has no '='; write it as key=value, such as trainer.num_steps=10")
    if not all(parts):
        raise ConfigError(f"override {override!r} has an empty part in its key {key!r}; write it as dotted.key=value")
    section = data
    for depth, part in enumerate(parts[:-1], start=1):
        if section.get(part) is None:  # left out, or an empty section
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            parent = ".".join(parts[:depth])
            raise ConfigError(
                f"override {override!r}: {parent}={section!r} is a value, not a section, so nothing can be set below "
                f"it; override {parent} itself"
            )
    section[parts[-1]] = _parse(override, text)


def _parse(override: str, text: str) -> object:
    """Read the value of an override as YAML."""
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
    except yaml.YAMLError as error:
        problem = _yaml_problem(error) if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"override {override!r}: the value is not valid YAML: {problem}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"override {override!r}: {_first_line(error)}") from error
    return cast("dict[str, object]", parsed)["value"]


def _resolve(data: dict[str, Any], file: Path) -> dict[str, Any]:
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(data), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(
            f"{file}: {place}{_first_line(error)}; give it a value, in the file or as key=value after it"
        ) from error
    return cast("dict[str, Any]", resolved)
