"""What a backend says of itself before anything heavy is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from verl_engine.contract.errors import UnsupportedError
from verl_engine.contract.markers import PLUGIN_API_VERSION

if TYPE_CHECKING:
    from verl_engine.contract.engine_config import EngineConfig  # brings pydantic

FEATURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "multi_rank": "runs on more than one data-parallel rank",
        "packed_batches": "runs sequences of all lengths laid end to end, without mixing them",
        "own_positions": "takes a sequence's own positions in place of 0, 1, 2 and so on",
        "bf16": "computes in bfloat16, with float32 gradient accumulation and master weights",
        "fp16": "computes in float16, with a loss scale that avoids underflow",
        "last_micro_batch_sync": "reduces gradients at the last micro-batch only, unless asked otherwise",
        "every_micro_batch_sync": "can reduce gradients at each micro-batch instead of the last one only",
        "snapshots": "copies its weights to the CPU and restores them",
        "offload": "moves to the CPU and back",
        "weight_import": "takes full weights under Hugging Face names",
        "weight_shards": "gives and takes each rank's shard of the weights, with its offsets in the whole",
        "forward_only": "runs a model without gradients and optimizer",
        "value_head": "ends in one number for each token instead of the vocabulary",
        "dropout": "draws the model's dropout, and runs it in train mode, where ``dropout: model`` asks for it",
        "entropy": "computes the entropy of each token's distribution, with and without gradient",
        "router_replay": "runs tokens through the experts that they bring, and says through which they went",
        "top_k_log_probs": "gives log-probs of k other token ids in each place, of given or of the most likely ones",
        "lora": "trains low-rank adapters in place of the whole model",
        "checkpoints": "saves and resumes all its state",
        "resharding": "resumes on another number of ranks",
    }
)
"""What an engine may be unable to do. All else is required of every backend."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Which features a backend lacks, and why. What is not named here it has, and the conformance kit proves it."""

    gaps: Mapping[str, str] = field(default_factory=dict)
    """Reason for each missing one of `FEATURES`; shown wherever the feature is asked for."""

    def __post_init__(self) -> None:
        """Refuse names that are not in `FEATURES`, with a ValueError."""
        unknown = sorted(self.gaps.keys() - FEATURES.keys())
        if unknown:
            raise ValueError(f"gaps names unknown features {unknown}; they are {sorted(FEATURES)}")


@dataclass(frozen=True, slots=True)
class DeclaredPatch:
    """A name that ``engine_prepare_process`` replaces. The host checks afterwards that it did."""

    target: str
    """``module:attribute`` or ``module:Class.method``, such as ``megatron.core.optimizer:Adam``."""
    reason: str
    """Why the original will not do, in a sentence; shown by ``verl-engine doctor --patches``."""
    kept_by: tuple[str, ...] = ()
    """Modules that hold the original on purpose, with all below them; elsewhere it is a stale alias, an error."""


@dataclass(frozen=True, slots=True)
class NeededModule:
    """A module that pip cannot find by a requirement of the distribution, since no package index has it."""

    module: str
    """Its name; a distribution that needs it says ``verl-engine-module-<name>`` among its keywords, too."""
    install: str
    """A line for a shell that installs it, at the release that the backend was written for."""


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """The torch-free self-description in a backend's hooks module, as ``SPEC``."""

    name: str
    """The name in the config; equal to the entry point's name."""
    config_class: type[EngineConfig]
    """Validates the job's ``engine`` section."""
    devices: tuple[str, ...]
    """Device kinds it runs on: ``cpu``, ``cuda``, ``npu``."""
    capabilities: Capabilities = field(default_factory=Capabilities)
    plugin_api_version: int = PLUGIN_API_VERSION
    """The version of the plugin API that it was written for: write the number out."""
    must_precede: tuple[str, ...] = ()
    """Modules, with all below them, that nobody may have imported before ``engine_prepare_process`` runs, such as
    ``megatron``. A process in which one is there already is refused."""
    patches: tuple[DeclaredPatch, ...] | Callable[[Any], tuple[DeclaredPatch, ...]] = ()
    """What preparation replaces: a tuple, or a function of the config where it depends on that."""
    process_settings: tuple[str, ...] | None = None
    """Fields of the config that preparation reads. Two roles in one process must agree on these, and on no others. By
    default on all."""

    needs: tuple[NeededModule, ...] = ()
    """Modules that are on no package index; ``verl-engine doctor`` tells how to get those that are missing."""

    def require(self, feature: str) -> None:
        """Refuse one of `FEATURES` that the backend says it cannot do: an UnsupportedError with its reason."""
        if feature not in FEATURES:
            raise ValueError(f"{feature!r} is not a feature; they are {sorted(FEATURES)}")
        reason = self.capabilities.gaps.get(feature)
        if reason is not None:
            raise UnsupportedError(f"engine.backend={self.name} cannot do {feature!r}: {reason}")

    def declared_patches(self, config: EngineConfig) -> tuple[DeclaredPatch, ...]:
        """Say what preparation replaces under this config."""
        return self.patches(config) if callable(self.patches) else self.patches
