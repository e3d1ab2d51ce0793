"""What a backend says of itself before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_engine.contract.markers import PLUGIN_API_VERSION

if TYPE_CHECKING:
    from verl_engine.contract.engine_config import EngineConfig


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. A feature that is False is refused by name, never ignored."""

    packed_batches: bool = True
    """Runs variable-length sequences packed into one row, without mixing them."""
    multi_rank: bool = True
    """Runs on more than one data-parallel rank."""
    bf16: bool = True
    """Computes in bfloat16 with float32 gradient reduction and float32 master weights."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The torch-free self-description in a backend's hooks module, as ``SPEC``."""

    name: str
    """The name in the config; equal to the entry point's name."""
    config_class: type[EngineConfig]
    """Validates the job's ``engine`` section."""
    devices: tuple[str, ...]
    """Device kinds it runs on: ``cpu``, ``cuda``, ``npu``."""
    capabilities: Capabilities = Capabilities()
    plugin_api_version: int = PLUGIN_API_VERSION
    """The version of the plugin API that it was written for: write the number out."""
