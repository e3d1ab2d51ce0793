"""Writes one checkpoint: its plan is made of the live state, its content may be a copy that training cannot reach."""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import find_tensor_shard

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoints.digests import SavedFile, describe_files, short_file
from verl_engine.engine.checkpoints.manifest import SavedWeight
from verl_engine.engine.checkpoints.ranks import CheckpointRanks
from verl_engine.engine.weights.module_weights import local_tensor
from verl_engine.engine.weights.tensor_shards import TensorShards

WEIGHTS: Final = "model."
"""What the keys of weights begin with."""


class StagingMemory:
    """Memory on the CPU for a copy of this rank's state; kept for the next one, since fresh pages are slow."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], torch.Tensor] = {}

    def copy(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy a flat state, tensors into own memory; on an accelerator the copies may still be under way.

        What a rank holds of a DTensor comes as a plain tensor: it has one part at most.
        """
        former, self._kept = self._kept, {}
        return {key: self._copy(key, value, former) for key, value in state.items()}

    def _copy(self, key: str, value: Any, former: dict[tuple[str, int], torch.Tensor]) -> Any:
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if isinstance(value, TensorShards):
            return value.map(lambda index, part: self._copy_tensor((key, index), part, former))
        return self._copy_tensor((key, 0), local_tensor(value), former)

    def _copy_tensor(
        self, place: tuple[str, int], live: torch.Tensor, former: dict[tuple[str, int], torch.Tensor]
    ) -> torch.Tensor:
        own = former.get(place)
        if own is None or own.shape != live.shape or own.dtype != live.dtype:
            own = torch.empty(live.shape, dtype=live.dtype, device="cpu", pin_memory=live.device.type != "cpu")
        # On the CPU neither detach() nor cpu() copies: training that goes on would write into the checkpoint.
        self._kept[place] = own.copy_(live, non_blocking=True)
        return own


class CheckpointPlanner(DefaultSavePlanner):
    """Plans what this rank writes; can be told to write a copy of the state instead of the state itself."""

    _copied: dict[str, Any] | None = None

    def stage(self, memory: StagingMemory) -> None:
        """Copy the state; it is no longer needed afterwards."""
        self._copied = memory.copy(self.state_dict)
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what is written for one item of the plan."""
        if self._copied is None:
            return super().lookup_object(index)
        copied = self._copied[index.fqn]
        return find_tensor_shard(copied, index) if isinstance(copied, TensorShards) else copied


def plan_checkpoint(state: dict[str, Any], ranks: CheckpointRanks) -> CheckpointPlanner:
    """Plan this rank's part. No collectives."""
    planner = CheckpointPlanner()
    planner.set_up_planner(state, is_coordinator=ranks.is_first)
    planner.create_local_plan()
    return planner


class CheckpointWriter:
    """Writes the parts of all ranks into a folder; `write` is a collective."""

    def __init__(self, folder: Path, planner: CheckpointPlanner, ranks: CheckpointRanks, doing: str) -> None:
        """Remember what to write into an existing folder that all ranks see; `doing` begins the messages."""
        self._folder = folder
        self._planner = planner
        self._ranks = ranks
        self._doing = doing
        self._writer = FileSystemWriter(folder, single_file_per_rank=True, sync_files=True, overwrite=False)
        self._metadata: Metadata | None = None
        self._results: list[list[WriteResult]] = []
        self.files: dict[str, SavedFile] = {}
        """What was written, by all ranks; on the first rank, after `write`."""

    def write(self) -> None:
        """Divide the work, and write this rank's files; raises as `CheckpointRanks.together` does."""
        plan = self._divide()
        with self._ranks.together(f"{self._doing}, writing the ranks' parts"):
            results = self._writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
            files = describe_files(self._folder, sorted({result.storage_data.relative_path for result in results}))
        told = self._ranks.gather((results, files), f"{self._doing}, collecting what was written")
        self._results = [results for results, _ in told]
        self.files = {name: file for _, files in told for name, file in files.items()}

    def finish(self) -> Metadata:
        """Write what says where everything is; on the first rank only, after `write`. No collectives.

        A WeightsError where what another rank wrote is not to be seen here.
        """
        assert self._metadata is not None
        parts = [result.storage_data for results in self._results for result in results]
        damage = missing_part(self._folder, parts)
        if damage:
            raise WeightsError(
                f"of what the ranks wrote, {damage} in {self._folder}, as the first rank sees it; checkpoints must lie "
                "on storage that all ranks share"
            )
        self._writer.finish(self._metadata, self._results)
        return self._metadata

    def _divide(self) -> SavePlan:
        doing = f"{self._doing}, dividing the work"
        self._writer.set_up_storage_writer(self._ranks.is_first)
        plans = self._ranks.gather(self._writer.prepare_local_plan(self._planner.plan), doing)
        with self._ranks.together(doing):
            if self._ranks.is_first:
                plans, self._metadata = self._planner.create_global_plan(plans)  # refuses overlaps and holes
                plans = self._writer.prepare_global_plan(plans)
        return self._ranks.scatter(plans, doing)


def missing_part(folder: Path, parts: Iterable[Any]) -> str:
    """Say which file that parts of a checkpoint lie in is missing or too short; empty if none is."""
    sizes: dict[str, int] = {}
    for part in parts:
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    return short_file(folder, sizes)


def saved_weights(metadata: Metadata) -> dict[str, SavedWeight]:
    """List the weights in a checkpoint."""
    return {
        key.removeprefix(WEIGHTS): SavedWeight(
            shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch.")
        )
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(WEIGHTS) and isinstance(entry, TensorStorageMetadata)
    }
