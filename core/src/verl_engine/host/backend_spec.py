"""Check what a backend says of the preparation that it needs."""

from verl_engine.contract.backend import BackendSpec, DeclaredPatch
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import EngineError, HookError, PatchError
from verl_engine.patching.target import Target


def check_backend_spec(spec: BackendSpec, label: str) -> None:
    """Check the fields of a SPEC that others than the loader read: a HookError before any hook runs."""
    roots: object = spec.must_precede  # a single string would be read letter by letter
    if not (isinstance(roots, tuple) and all(isinstance(root, str) and root for root in roots)):
        raise HookError(f"{label}: SPEC.must_precede={roots!r} must be a tuple of module names, such as ('megatron',)")
    if not callable(spec.patches):
        _check_patches(spec.patches, label)
    unknown = [name for name in spec.process_settings or () if name not in spec.config_class.model_fields]
    if unknown:
        owner = spec.config_class.__name__
        raise HookError(f"{label}: SPEC.process_settings names {', '.join(unknown)}, which {owner} does not have")


def declared_patches(spec: BackendSpec, config: EngineConfig, label: str) -> tuple[DeclaredPatch, ...]:
    """Ask a backend what it patches under a config; `HookError` where it cannot say, its own error where it refuses."""
    try:
        declared: object = spec.declared_patches(config)
    except EngineError:
        raise
    except Exception as cause:  # a plugin's function can raise anything
        raise HookError(f"{label}: SPEC.patches(config) failed: {type(cause).__name__}: {cause}") from cause
    return _check_patches(declared, label)


def _check_patches(declared: object, label: str) -> tuple[DeclaredPatch, ...]:
    if not isinstance(declared, tuple):
        what = "a tuple of DeclaredPatch, or a function of the config"
        raise HookError(f"{label}: SPEC.patches={declared!r} must be {what}")
    for patch in declared:
        if not isinstance(patch, DeclaredPatch):
            raise HookError(f"{label}: SPEC.patches holds {patch!r}; write DeclaredPatch('module:name', 'why')")
        try:
            Target.parse(patch.target)
        except PatchError as error:
            raise HookError(f"{label}: SPEC.patches: {error}") from error
    return declared
