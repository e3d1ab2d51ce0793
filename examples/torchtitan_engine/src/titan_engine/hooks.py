"""What the backend ``titan_engine`` says of itself, and its hook. Torch is imported inside it only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_engine.config import TitanConfig
from verl_engine import BackendSpec, Capabilities, hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from titan_engine.engine import TitanEngine

DENSE = "trains a dense Qwen3, which has no dropout, in float32 or bfloat16"
SPEC = BackendSpec(
    name="titan_engine",
    config_class=TitanConfig,
    devices=("cpu", "cuda"),
    capabilities=Capabilities(gaps=dict.fromkeys(("dropout", "fp16", "lora", "router_replay", "value_head"), DENSE)),
    plugin_api_version=2,
)


@hookimpl
def engine_create(config: TitanConfig, model_folder: Path) -> TitanEngine:
    """Build the model, shard it, and load its weights."""
    from titan_engine.engine import TitanEngine

    return TitanEngine(config, model_folder)
