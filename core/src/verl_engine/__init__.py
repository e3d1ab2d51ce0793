"""Training engines for language models, chosen by name. Names are imported at their first use: none pulls torch in."""

from verl_engine.contract.errors import (
    BatchError,
    ConfigError,
    DuplicatePluginError,
    EngineError,
    HookError,
    ImportOrderError,
    ModelError,
    PatchError,
    PluginApiVersionError,
    PluginError,
    PluginImportError,
    PreparationConflictError,
    StuckError,
    TrainingDivergedError,
    UnknownPluginError,
    UnsupportedError,
    WeightsError,
)

TYPE_CHECKING = False  # type checkers take it as True, like typing's, whose import would take most of the time here
if TYPE_CHECKING:
    from verl_engine.batch.packed import PackedBatch, SegmentRun
    from verl_engine.batch.sequence import Sequence
    from verl_engine.contract.backend import BackendSpec, Capabilities, DeclaredPatch, NeededModule
    from verl_engine.contract.config_file import read_config, validate
    from verl_engine.contract.engine_config import EngineConfig, LoraConfig
    from verl_engine.contract.kinds import KindSpec
    from verl_engine.contract.markers import hookimpl
    from verl_engine.contract.names import PLUGIN_API_VERSION
    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.contract.strict_model import StrictModel
    from verl_engine.engine.base import (
        DataParallel,
        Engine,
        LossFn,
        MicroBatchPass,
        TokenOutput,
        WeightShard,
        WeightSpec,
    )
    from verl_engine.engine.checkpoints.store import CheckpointInfo, CheckpointStore
    from verl_engine.engine.device import Device
    from verl_engine.engine.fully_sharded import FullyShardedPasses
    from verl_engine.engine.linear_log_probs import Entropy
    from verl_engine.engine.loss_scaler import LossScaler
    from verl_engine.engine.metrics import Metric
    from verl_engine.engine.module_engine import ModuleEngine
    from verl_engine.engine.offload import GradientSlot
    from verl_engine.engine.optimizer import adamw, parameter_groups
    from verl_engine.engine.output_from_logits import output_from_logits
    from verl_engine.engine.snapshots.shared import SnapshotHandle, SnapshotReader
    from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot
    from verl_engine.engine.temperature import Temperature
    from verl_engine.engine.weights.engine_weights import EngineWeights
    from verl_engine.engine.weights.model_files import ModelFiles
    from verl_engine.engine.weights.model_folder import write_model_folder
    from verl_engine.engine.weights.module_weights import Exported, LowRank
    from verl_engine.engine.weights.renamed import RenamedWeights
    from verl_engine.engine.worker import EngineWorker
    from verl_engine.host.backend_host import BackendHost
    from verl_engine.host.engine_section import validate_engine_section
    from verl_engine.host.loading import load_plugin
    from verl_engine.patching.first_import import patch_on_import
    from verl_engine.patching.patches import patch

__version__ = "0.1.0"

_HOMES = {
    "batch.packed": ["PackedBatch", "SegmentRun"],
    "batch.sequence": ["Sequence"],
    "contract.backend": ["BackendSpec", "Capabilities", "NeededModule", "DeclaredPatch"],
    "contract.config_file": ["read_config", "validate"],
    "contract.engine_config": ["EngineConfig", "LoraConfig"],
    "contract.kinds": ["KindSpec"],
    "contract.markers": ["hookimpl"],
    "contract.names": ["PLUGIN_API_VERSION"],
    "contract.optimizer_step": ["OptimizerStep"],
    "contract.strict_model": ["StrictModel"],
    "engine.base": ["DataParallel", "Engine", "LossFn", "MicroBatchPass", "TokenOutput", "WeightShard", "WeightSpec"],
    "engine.checkpoints.store": ["CheckpointInfo", "CheckpointStore"],
    "engine.device": ["Device"],
    "engine.fully_sharded": ["FullyShardedPasses"],
    "engine.linear_log_probs": ["Entropy"],
    "engine.loss_scaler": ["LossScaler"],
    "engine.metrics": ["Metric"],
    "engine.module_engine": ["ModuleEngine"],
    "engine.offload": ["GradientSlot"],
    "engine.optimizer": ["adamw", "parameter_groups"],
    "engine.output_from_logits": ["output_from_logits"],
    "engine.snapshots.shared": ["SnapshotHandle", "SnapshotReader"],
    "engine.snapshots.weight_snapshot": ["WeightSnapshot"],
    "engine.temperature": ["Temperature"],
    "engine.weights.engine_weights": ["EngineWeights"],
    "engine.weights.model_files": ["ModelFiles"],
    "engine.weights.model_folder": ["write_model_folder"],
    "engine.weights.module_weights": ["Exported", "LowRank"],
    "engine.weights.renamed": ["RenamedWeights"],
    "engine.worker": ["EngineWorker"],
    "host.backend_host": ["BackendHost"],
    "host.engine_section": ["validate_engine_section"],
    "patching.first_import": ["patch_on_import"],
    "host.loading": ["load_plugin"],
    "patching.patches": ["patch"],
}
"""Where each public name lives."""

__all__ = [
    "PLUGIN_API_VERSION", "BackendHost", "BackendSpec", "BatchError", "Capabilities", "CheckpointInfo",
    "CheckpointStore", "ConfigError", "DataParallel", "DeclaredPatch", "Device", "DuplicatePluginError", "Engine",
    "EngineConfig", "EngineError", "EngineWeights", "EngineWorker", "Entropy", "Exported", "FullyShardedPasses",
    "GradientSlot", "HookError", "ImportOrderError", "KindSpec", "LoraConfig", "LossFn", "LossScaler", "LowRank",
    "Metric", "MicroBatchPass", "ModelError", "ModelFiles", "ModuleEngine", "NeededModule", "OptimizerStep",
    "PackedBatch", "PatchError", "PluginApiVersionError", "PluginError", "PluginImportError",
    "PreparationConflictError", "RenamedWeights", "SegmentRun", "Sequence", "SnapshotHandle", "SnapshotReader",
    "StrictModel", "StuckError", "Temperature", "TokenOutput", "TrainingDivergedError", "UnknownPluginError",
    "UnsupportedError", "WeightShard", "WeightSnapshot", "WeightSpec", "WeightsError", "__version__", "adamw",
    "hookimpl", "load_plugin", "output_from_logits", "parameter_groups", "patch", "patch_on_import", "read_config",
    "validate", "validate_engine_section", "write_model_folder",
]  # fmt: skip


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    import importlib  # not before it is needed

    for module, names in _HOMES.items():
        if name in names:
            found: object = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = found  # from now on without this function
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, for completion."""
    return sorted({*globals(), *__all__})
