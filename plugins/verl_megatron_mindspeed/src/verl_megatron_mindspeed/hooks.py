"""What the megatron backend says of itself, and its hooks. Torch and Megatron are imported inside them only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec, Capabilities
from verl_engine.contract.markers import hookimpl
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.preparation import SETTINGS, declared_patches, prepare_process

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot
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
        }
    ),
    plugin_api_version=1,
    must_precede=("megatron",),
    patches=declared_patches,
    process_settings=SETTINGS,
)


@hookimpl
def engine_prepare_process(config: MegatronConfig) -> None:
    """Patch what Megatron needs patched on this kind of device, before anybody imports it."""
    prepare_process(config)


@hookimpl
def engine_create(config: MegatronConfig, model_folder: Path) -> MegatronEngine:
    """Build the Megatron model of a Hugging Face folder."""
    from verl_megatron_mindspeed.engine import MegatronEngine

    return MegatronEngine(config, model_folder)


@hookimpl
def engine_gradient_sync(engine: MegatronEngine, is_last_micro_batch: bool) -> AbstractContextManager[None]:
    """Hold gradients back until the last micro-batch."""
    return engine.gradient_sync(is_last_micro_batch=is_last_micro_batch)


@hookimpl
def engine_optimizer_step(engine: MegatronEngine) -> OptimizerStep:
    """Clip, and step or skip on all ranks alike."""
    return engine.optimizer_step()


@hookimpl
def engine_copy_weights_to_cpu(engine: MegatronEngine, snapshot: WeightSnapshot) -> WeightSnapshot:
    """Copy this rank's weights, float32 masters and buffers."""
    return snapshot.store(engine.local_weights())


@hookimpl
def engine_restore_weights_from_cpu(engine: MegatronEngine, snapshot: WeightSnapshot) -> bool:
    """Copy them back."""
    snapshot.copy_into(engine.local_weights())
    return True
