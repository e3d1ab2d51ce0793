"""What the fsdp backend (FSDP1) says of itself, and its hooks: those of fsdp2, with another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.markers import hookimpl
from verl_fsdp.config import FsdpConfig
from verl_fsdp.hooks import (
    engine_copy_weights_to_cpu,
    engine_gradient_sync,
    engine_optimizer_step,
    engine_restore_weights_from_cpu,
)

if TYPE_CHECKING:
    from pathlib import Path

    from verl_fsdp.fsdp1.engine import Fsdp1Engine

__all__ = [
    "SPEC",
    "engine_copy_weights_to_cpu",
    "engine_create",
    "engine_gradient_sync",
    "engine_optimizer_step",
    "engine_restore_weights_from_cpu",
]

SPEC = BackendSpec(
    name="fsdp",
    config_class=FsdpConfig,
    devices=("cpu", "cuda", "npu"),
    plugin_api_version=1,
)


@hookimpl
def engine_create(config: FsdpConfig, model_folder: Path) -> Fsdp1Engine:
    """Load a Hugging Face model and shard it."""
    from verl_fsdp.fsdp1.engine import Fsdp1Engine

    return Fsdp1Engine(config, model_folder)
