"""What the megatron backend says of itself, and its hooks. Torch and Megatron are imported inside them only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec, Capabilities
from verl_engine.contract.markers import hookimpl
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.preparation import declared_patches, prepare_process

if TYPE_CHECKING:
    from verl_megatron_mindspeed.engine import MegatronEngine

SPEC = BackendSpec(
    name="megatron",
    config_class=MegatronConfig,
    devices=("cpu", "cuda", "npu"),
    capabilities=Capabilities(
        gaps={
            "every_micro_batch_sync": "Megatron keeps a whole float32 gradient on each rank in any case, so reducing "
            "it more often would save no memory",
            "lora": "Megatron-core has no adapters",
            "own_positions": "Megatron's rotary embedding counts the positions of packed sequences itself",
        }
    ),
    plugin_api_version=2,
    must_precede=("megatron",),
    patches=declared_patches,
    process_settings=("device", "mindspeed"),
)


@hookimpl
def engine_prepare_process(config: MegatronConfig) -> None:
    """Patch what Megatron needs patched on this kind of device, before anybody imports it."""
    prepare_process(config)


@hookimpl
def engine_create(config: MegatronConfig, model_folder: Path) -> MegatronEngine:
    """Build the Megatron model of a Hugging Face folder."""
    from verl_megatron_mindspeed.build import build

    return build(config, model_folder)
