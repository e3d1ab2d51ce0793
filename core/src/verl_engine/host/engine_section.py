"""The ``engine`` section of a job: its ``backend`` key chooses who validates it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_engine.contract.errors import ConfigError
from verl_engine.contract.kinds import BACKEND
from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.catalog import list_plugins
from verl_engine.host.install_hints import pip_install
from verl_engine.host.observers import check_observers

if TYPE_CHECKING:
    from verl_engine.contract.engine_config import EngineConfig


def validate_engine_section(section: object, at: str = "engine") -> EngineConfig:
    """Validate an engine section by the config class of the backend that it names. No torch is imported.

    Args:
        section: the mapping read from the job's file.
        at: its dotted path; for messages.
    Returns:
        The backend's own config.
    Raises:
        ConfigError: the section is no mapping, names no backend, or has a wrong field.
        PluginError: the backend cannot be loaded, or an observer is not installed.
    """
    if not isinstance(section, Mapping):
        raise ConfigError(f"{at}={section!r} must be a section with at least {_backend_line(at)}")
    backend = section.get("backend")
    if backend is None:
        raise ConfigError(f"{at}.backend is missing; write {_backend_line(at)}")
    if not isinstance(backend, str):
        raise ConfigError(f"{at}.backend={backend!r} must be a name; write {_backend_line(at)}")
    config = validate(BackendHost.load(backend, at=f"{at}.backend").spec.config_class, section, at=at)
    check_observers(config.observers, f"{at}.observers")
    return config


def _backend_line(at: str) -> str:
    names = sorted({entry.name for entry in list_plugins(BACKEND)})
    if not names:
        return f"{at}.backend=fsdp2, after installing a backend: {pip_install('verl-fsdp')}"
    return f"{at}.backend=NAME, where NAME is one of the installed backends: {', '.join(names)}"
