"""Read a job's YAML file, with dotted overrides from the command line."""

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.validation import shown, validate
from verl_engine.contract.yaml_text import DEEPEST, is_unicode, read_yaml

__all__ = ["literal", "read_config", "read_overrides", "validate"]

_HOW_LITERAL: Final = " (a literal ${ is written \\${)"
_DOLLAR_BRACE: Final = re.compile(r"(\\*)\$\{")


def read_config(path: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read a YAML file, apply overrides in order, and resolve interpolations such as ``${data.seed}``.

    Args:
        path: the YAML file; its top level is a mapping.
        overrides: ``dotted.key=value`` each; the value is YAML 1.2 as in the file, so ``x=null``, ``x=1e-4`` and
            ``x=[1, 2]`` work. Sections that the file leaves out are made.
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
    """Make a mapping of ``dotted.key=value`` texts alone, as `read_config` reads them."""
    data: dict[str, Any] = {}
    for override in overrides:
        _apply(data, override)
    return data


def literal(value: Any) -> Any:
    r"""Return plain values with each ``${`` in their texts written as ``\${``, so that reading does not replace it."""
    if isinstance(value, str):
        return _DOLLAR_BRACE.sub(r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: literal(item) for key, item in value.items()}
    return [literal(item) for item in value] if isinstance(value, list) else value


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        is_file = file.is_file()
    except OSError as error:  # its name is too long, say
        raise ConfigError(f"config file {shown(str(file))} cannot be read: {error.strerror}") from error
    if not is_file:
        raise ConfigError(f"config file {file} {'is a folder' if file.is_dir() else 'does not exist'}{_similar(file)}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} cannot be read as UTF-8 text: {error}") from error
    try:
        loaded = read_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"{file}, {error}") from error.__cause__
    if not isinstance(loaded, dict | None):
        kind = "a list" if isinstance(loaded, list) else "a single value"
        raise ConfigError(f"{file}: the top level is {kind}, but must be a mapping of sections (`model:`, `engine:` …)")
    return loaded or {}


def _similar(file: Path) -> str:
    if not file.parent.is_dir():
        return f"; the folder {file.parent} does not exist either"
    neighbours = [other.name for other in file.parent.iterdir() if other.suffix in {".yaml", ".yml"}]
    close = difflib.get_close_matches(file.name, neighbours, n=1)
    return f"; did you mean {file.parent / close[0]}?" if close else ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not is_unicode(override):
        raise ConfigError(f"override {shown(override)} is not UTF-8 text")
    if not equals:
        raise ConfigError(f"override {shown(override)} has no '='; write it as key=value, such as trainer.num_steps=10")
    if not all(parts) or len(parts) > DEEPEST:
        fault = "an empty part" if not all(parts) else f"more than {DEEPEST} parts"
        raise ConfigError(
            f"override {shown(override)} has {fault} in its key {shown(key)}; write it as dotted.key=value"
        )
    section = data
    for depth, part in enumerate(parts[:-1], start=1):
        if section.get(part) is None:  # left out, or an empty section
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            parent = ".".join(parts[:depth])
            raise ConfigError(
                f"override {shown(override)}: {parent}={shown(section)} is a value, not a section, so nothing can be "
                f"set below it; override {parent} itself"
            )
    section[parts[-1]] = _parse(override, text)


def _parse(override: str, text: str) -> object:
    try:
        value = read_yaml(text)
        OmegaConf.create({"value": value})  # an interpolation that does not parse is named here
    except ConfigError as error:
        problem = str(error).replace("not valid YAML: ", "")
        raise ConfigError(f"override {shown(override)}: the value is not valid YAML: {problem}") from error.__cause__
    except OmegaConfBaseException as error:
        raise ConfigError(f"override {shown(override)}: {_first_line(error)}{_HOW_LITERAL}") from error
    return value


def _resolve(data: dict[str, Any], file: Path) -> dict[str, Any]:
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(data), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        place = f"{error.full_key}: " if error.full_key else ""
        raise ConfigError(
            f"{file}: {place}{_first_line(error)}; give it a value, in the file or as key=value after it{_HOW_LITERAL}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{file}: values are nested too deeply, or an interpolation leads back to itself") from error
    return cast("dict[str, Any]", resolved)
