"""What the fsdp2 backend says of itself, and its hook. Torch is imported inside it only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.markers import hookimpl
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from verl_fsdp.engine import ShardedEngine

SPEC = BackendSpec(name="fsdp2", config_class=Fsdp2Config, devices=("cpu", "cuda", "npu"), plugin_api_version=2)


@hookimpl
def engine_create(config: Fsdp2Config, model_folder: Path) -> ShardedEngine:
    """Load a Hugging Face causal LM and shard it."""
    from verl_fsdp.fsdp2.build import build

    return build(config, model_folder)
