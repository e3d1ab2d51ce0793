"""What the fsdp_turbo backend says of itself, and its hooks. Torch and the library are imported inside them only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec, NeededModule
from verl_engine.contract.markers import hookimpl
from verl_fsdp_turbo.config import FsdpTurboConfig
from verl_fsdp_turbo.library import INSTALL, MODULE
from verl_fsdp_turbo.preparation import declared_patches, prepare_process

if TYPE_CHECKING:
    from verl_fsdp.engine import ShardedEngine

SPEC = BackendSpec(
    name="fsdp_turbo",
    config_class=FsdpTurboConfig,
    devices=("cpu", "cuda", "npu"),
    plugin_api_version=2,
    patches=declared_patches,
    process_settings=("device",),
    needs=(NeededModule(MODULE, INSTALL),),
)


@hookimpl
def engine_prepare_process(config: FsdpTurboConfig) -> None:
    """Check that the library is there; on the CPU tell it the device."""
    prepare_process(config)


@hookimpl
def engine_create(config: FsdpTurboConfig, model_folder: Path) -> ShardedEngine:
    """Load a Hugging Face model and let the library shard it."""
    from verl_fsdp_turbo.build import build

    return build(config, model_folder)
