"""What the fsdp2 backend says of itself, and its hooks. Torch is imported inside them only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.markers import hookimpl
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot
    from verl_fsdp.engine import ShardedEngine
    from verl_fsdp.fsdp2.engine import Fsdp2Engine

SPEC = BackendSpec(
    name="fsdp2",
    config_class=Fsdp2Config,
    devices=("cpu", "cuda", "npu"),
    plugin_api_version=1,
)


@hookimpl
def engine_create(config: Fsdp2Config, model_folder: Path) -> Fsdp2Engine:
    """Load a Hugging Face causal LM and shard it."""
    from verl_fsdp.fsdp2.engine import Fsdp2Engine

    return Fsdp2Engine(config, model_folder)


@hookimpl
def engine_gradient_sync(engine: ShardedEngine, is_last_micro_batch: bool) -> AbstractContextManager[None]:
    """Hold gradients back until the last micro-batch, unless configured otherwise."""
    return engine.gradient_sync(is_last_micro_batch=is_last_micro_batch)


@hookimpl
def engine_optimizer_step(engine: ShardedEngine) -> OptimizerStep:
    """Clip, and step or skip on all ranks alike."""
    return engine.optimizer_step()


@hookimpl
def engine_copy_weights_to_cpu(engine: ShardedEngine, snapshot: WeightSnapshot) -> WeightSnapshot:
    """Copy this rank's shards."""
    return snapshot.store(engine.local_weights())


@hookimpl
def engine_restore_weights_from_cpu(engine: ShardedEngine, snapshot: WeightSnapshot) -> bool:
    """Copy this rank's shards back."""
    snapshot.copy_into(engine.local_weights())
    return True
