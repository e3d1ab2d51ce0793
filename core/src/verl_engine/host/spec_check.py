"""Check what a plugin says of itself, before anything of it runs."""

import importlib
from typing import Any

from verl_engine.contract.errors import HookError, PluginApiVersionError
from verl_engine.contract.kinds import KindSpec
from verl_engine.host.config_check import check_config_class
from verl_engine.host.install_hints import pip_install


def check_api_version(kind: KindSpec, subject: str, version: int, distribution: str = "") -> None:
    """Refuse a plugin that was written for another plugin API than its kind has."""
    if version == kind.api_version:
        return
    upgrade = distribution if version < kind.api_version else kind.owner
    advice = f"; upgrade the older of the two: {pip_install('--upgrade', upgrade)}" if upgrade else ""
    raise PluginApiVersionError(
        f"{subject} was written for plugin API {version}, but this {kind.owner} has plugin API "
        f"{kind.api_version}{advice}"
    )


def checked_spec(kind: KindSpec, module: object, name: str | None, label: str, distribution: str = "") -> Any:
    """Return a plugin's ``SPEC``, which must be called `name`, unless that is None.

    A HookError where it is missing or wrong, a PluginApiVersionError where it is of another plugin API.
    """
    spec_class, config_base = _load(kind.spec_class), _load(kind.config_class)
    try:
        spec: Any = getattr(module, "SPEC", None)
    except Exception as cause:  # a module that makes its names when asked can raise anything
        raise HookError(f"{label}: looking up SPEC failed: {type(cause).__name__}: {cause}") from cause
    if not isinstance(spec, spec_class):
        got = "has no SPEC" if spec is None else f"has a SPEC of type {type(spec).__name__}"
        raise HookError(f"{label} {got}; its module must define SPEC = {spec_class.__name__}(…)")
    if name is not None and spec.name != name:
        raise HookError(f"{label}: SPEC.name={spec.name!r} must equal the entry point's name {name!r}")
    config_class: object = spec.config_class  # a plugin's: whatever its annotation says
    if not (isinstance(config_class, type) and issubclass(config_class, config_base)):
        raise HookError(f"{label}: SPEC.config_class={config_class!r} must be a subclass of {config_base.__name__}")
    check_config_class(config_class, config_base, kind.chosen_by.rpartition(".")[2], spec.name, label)
    version: object = spec.plugin_api_version
    if not isinstance(version, int):
        raise HookError(f"{label}: SPEC.plugin_api_version={version!r} must be a whole number, such as 1")
    check_api_version(kind, label, version, distribution)
    return spec


def _load(reference: str) -> Any:
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)
