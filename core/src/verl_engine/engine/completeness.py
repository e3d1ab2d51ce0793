"""Whether an engine has the methods that its backend's hooks and features need."""

from collections.abc import Iterator
from typing import Final

from verl_engine.contract.errors import PluginError
from verl_engine.engine.base import Engine
from verl_engine.host.backend_host import BackendHost

METHODS_OF_FEATURES: Final = {
    "offload": ("move",),
    "weight_import": ("load_full_weights",),
    "weight_shards": ("weight_shards", "load_weight_shards"),
    "lora": ("disable_adapter", "save_adapter", "adapter_specs", "adapter_config"),
    "checkpoints": ("state_dict", "load_state_dict"),
}
"""Methods that an engine has unless its backend declares the gap."""


def require_complete(engine: Engine, host: BackendHost, world_size: int) -> None:
    """Refuse, with a PluginError, an engine that lacks methods which nothing says it lacks."""
    missing = [
        f"{method} ({why})"
        for method, why in _needed(host, world_size)
        if getattr(type(engine), method) is getattr(Engine, method)
    ]
    if missing:
        raise PluginError(
            f"{host.label}: {type(engine).__name__} lacks {', '.join(missing)}; write what is missing, or declare the "
            "gap in SPEC.capabilities"
        )


def _needed(host: BackendHost, world_size: int) -> Iterator[tuple[str, str]]:
    gaps = host.spec.capabilities.gaps
    if "engine_optimizer_step" in host.default_hooks:
        yield "optimizer_step", "for the hook engine_optimizer_step"
    if "engine_gradient_sync" in host.default_hooks and world_size > 1:
        yield "gradient_sync", f"for the hook engine_gradient_sync, on {world_size} ranks"
    of_snapshots = {"engine_copy_weights_to_cpu", "engine_restore_weights_from_cpu"}
    if "snapshots" not in gaps and of_snapshots & host.default_hooks:
        yield "local_weights", "feature 'snapshots'"
    for feature, methods in METHODS_OF_FEATURES.items():
        if feature not in gaps:
            yield from ((method, f"feature {feature!r}") for method in methods)
