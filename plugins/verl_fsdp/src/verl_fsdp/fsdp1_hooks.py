"""What the fsdp backend (FSDP1) says of itself, and its hook. Torch is imported inside it only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.markers import hookimpl
from verl_fsdp.config import FsdpConfig

if TYPE_CHECKING:
    from verl_fsdp.engine import ShardedEngine

SPEC = BackendSpec(name="fsdp", config_class=FsdpConfig, devices=("cpu", "cuda", "npu"), plugin_api_version=2)


@hookimpl
def engine_create(config: FsdpConfig, model_folder: Path) -> ShardedEngine:
    """Load a Hugging Face model and shard it."""
    from verl_fsdp.fsdp1.build import build

    return build(config, model_folder)
