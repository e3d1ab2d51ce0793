"""Check what a backend says of itself, before any of its hooks runs."""

from __future__ import annotations

from verl_engine.contract.backend import BackendSpec, PatchPromise
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import HookError, PatchError
from verl_engine.host.loading import check_api_version
from verl_engine.host.preparation.targets import Target


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
    spec: object = getattr(module, "SPEC", None)
    if not isinstance(spec, BackendSpec):
        got = "has no SPEC" if spec is None else f"has a SPEC of type {type(spec).__name__}"
        raise HookError(f"{label} {got}; its hooks module must define SPEC = BackendSpec(…)")
    if name is not None and spec.name != name:
        raise HookError(f"{label}: SPEC.name={spec.name!r} must equal the entry point's name {name!r}")
    config_class: object = spec.config_class  # a stranger's: whatever its annotation says
    if not (isinstance(config_class, type) and issubclass(config_class, EngineConfig)):
        raise HookError(f"{label}: SPEC.config_class={config_class!r} must be a subclass of EngineConfig")
    check_api_version(label, spec.plugin_api_version, distribution)
    _check_preparation(spec, label)
    return spec


def _check_preparation(spec: BackendSpec, label: str) -> None:
    roots: object = spec.must_precede  # a lone text would be taken letter by letter
    if not (isinstance(roots, tuple) and all(isinstance(root, str) and root for root in roots)):
        raise HookError(f"{label}: SPEC.must_precede={roots!r} must be a tuple of module names, such as ('megatron',)")
    patches: object = spec.patches
    if isinstance(patches, tuple):
        for promise in patches:
            if not isinstance(promise, PatchPromise):
                raise HookError(f"{label}: SPEC.patches holds {promise!r}; write PatchPromise('module:name', 'why')")
            try:
                Target.parse(promise.target)
            except PatchError as error:
                raise HookError(f"{label}: SPEC.patches: {error}") from error
    elif not callable(patches):
        raise HookError(
            f"{label}: SPEC.patches={patches!r} must be a tuple of PatchPromise, or a function of the config"
        )
    unknown = [name for name in spec.process_settings or () if name not in spec.config_class.model_fields]
    if unknown:
        owner = spec.config_class.__name__
        raise HookError(f"{label}: SPEC.process_settings names {', '.join(unknown)}, which {owner} does not have")
