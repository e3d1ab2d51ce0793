"""Check what a backend says of itself, before any of its hooks runs."""

from __future__ import annotations

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import HookError
from verl_engine.host.loading import check_api_version
from verl_engine.host.preparation.patch_promises import checked_promises


def checked_spec(module: object, name: str | None, label: str, distribution: str = "") -> BackendSpec:
    """Return a hooks module's ``SPEC``.

    Args:
        module: the hooks module.
        name: what it must be called; None for any.
        label: names the backend in messages.
        distribution: which one offers it, if any.
    Raises:
        HookError: it is missing or wrong.
        PluginApiVersionError: it was written for another plugin API.
    """
    try:
        spec: object = getattr(module, "SPEC", None)
    except Exception as cause:  # a module that makes its names when asked can raise anything
        raise HookError(f"{label}: looking up SPEC failed: {type(cause).__name__}: {cause}") from cause
    if not isinstance(spec, BackendSpec):
        got = "has no SPEC" if spec is None else f"has a SPEC of type {type(spec).__name__}"
        raise HookError(f"{label} {got}; its hooks module must define SPEC = BackendSpec(…)")
    if name is not None and spec.name != name:
        raise HookError(f"{label}: SPEC.name={spec.name!r} must equal the entry point's name {name!r}")
    config_class: object = spec.config_class  # a stranger's: whatever its annotation says
    if not (isinstance(config_class, type) and issubclass(config_class, EngineConfig)):
        raise HookError(f"{label}: SPEC.config_class={config_class!r} must be a subclass of EngineConfig")
    version: object = spec.plugin_api_version
    if not isinstance(version, int):
        raise HookError(f"{label}: SPEC.plugin_api_version={version!r} must be a whole number, such as 1")
    check_api_version(label, version, distribution)
    _check_preparation(spec, label)
    return spec


def _check_preparation(spec: BackendSpec, label: str) -> None:
    roots: object = spec.must_precede  # a lone text would be taken letter by letter
    if not (isinstance(roots, tuple) and all(isinstance(root, str) and root for root in roots)):
        raise HookError(f"{label}: SPEC.must_precede={roots!r} must be a tuple of module names, such as ('megatron',)")
    if not callable(spec.patches):
        checked_promises(spec.patches, label)
    unknown = [name for name in spec.process_settings or () if name not in spec.config_class.model_fields]
    if unknown:
        owner = spec.config_class.__name__
        raise HookError(f"{label}: SPEC.process_settings names {', '.join(unknown)}, which {owner} does not have")
