"""The ``engine`` section of a job: its ``backend`` key chooses who validates it."""

from collections.abc import Mapping
from typing import NamedTuple

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.kinds import BACKEND, KindSpec
from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.catalog import list_plugins
from verl_engine.host.install_hints import pip_install
from verl_engine.host.observers import check_observers


class EngineSection(NamedTuple):
    """A validated section, with its backend."""

    config: EngineConfig
    """The backend's own."""
    spec: BackendSpec


def load_engine_section(section: object, at: str = "engine") -> EngineSection:
    """Load the backend that an engine section, read from `at` of the job, names; it validates the section. No torch.

    Raises:
        ConfigError: the section is no mapping, names no backend, or has a wrong field.
        PluginError: the backend cannot be loaded, or an observer is not installed.
    """
    chosen, values = chosen_plugin(BACKEND, section, at)
    spec = BackendHost.load(chosen, at=f"{at}.backend").spec
    config = validate(spec.config_class, values, at=at)
    check_observers(config.observers, f"{at}.observers")
    return EngineSection(config, spec)


def validate_engine_section(section: object, at: str = "engine") -> EngineConfig:
    """Return the config alone; see `load_engine_section`."""
    return load_engine_section(section, at).config


def chosen_plugin(kind: KindSpec, section: object, at: str) -> tuple[str, Mapping[str, object]]:
    """Return the plugin that a section at `at` chooses, and the section; a ConfigError where it is no such section."""
    key = kind.chosen_by.rpartition(".")[2]
    if not isinstance(section, Mapping):
        raise ConfigError(f"{at}={section!r} must be a section with at least {_line(kind, at)}")
    name = section.get(key)
    if name is None:
        raise ConfigError(f"{at}.{key} is missing; write {_line(kind, at)}")
    if not isinstance(name, str):
        raise ConfigError(f"{at}.{key}={name!r} must be a name; write {_line(kind, at)}")
    return name, section


def _line(kind: KindSpec, at: str) -> str:
    field = f"{at}.{kind.chosen_by.rpartition('.')[2]}"
    names = sorted({entry.name for entry in list_plugins(kind)})
    if names:
        return f"{field}=NAME, where NAME is one of the installed {kind.title}s: {', '.join(names)}"
    name, distribution = next(iter(kind.known.items()), ("NAME", ""))
    after = f", after installing it: {pip_install(distribution)}" if distribution else ""
    return f"{field}={name}{after}"
