"""Reads a checkpoint into a state of the same structure, after making sure that it fits: nothing is half loaded."""

from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoints.folders import require_whole
from verl_engine.engine.checkpoints.writer import WEIGHTS, missing_part

_MAY_BE_MISSING: Final = ("buffers", "loss_scaler")
"""Parts that stay as they are where a checkpoint lacks them: it may come from an engine without them."""
_NUM_NAMED: Final = 4


class CheckpointReader:
    """One rank's view of a whole checkpoint. No collectives."""

    def __init__(self, folder: Path) -> None:
        """Read where everything is; a WeightsError where the checkpoint is not whole, or files are too short."""
        self.folder = require_whole(folder)
        self._storage = FileSystemReader(folder)
        try:
            self.metadata: Metadata = self._storage.read_metadata()
            damage = missing_part(folder, (self.metadata.storage_data or {}).values())
        except Exception as error:  # a damaged pickle raises all kinds
            raise WeightsError(f"{folder}/.metadata cannot be read: {type(error).__name__}: {error}") from error
        if damage:
            raise WeightsError(f"{folder} is damaged: {damage}; load another step")

    def fit(self, state: dict[str, Any]) -> None:
        """Make sure that a state can be read, and take out of it what the checkpoint lacks and need not have.

        Taken out are the optimizer's state of parameters that had not been trained when it was saved, and all of
        ``buffers`` and ``loss_scaler`` that is not there.

        Raises:
            WeightsError: it is a checkpoint of another model or another optimizer; names the first differences.
        """
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state)
        wanted = planner.state_dict
        saved = self.metadata.state_dict_metadata
        missing = [key for key in wanted if key not in saved]
        optional = {key for key in missing if _is_optional(planner.mappings[key], saved)}
        wrong = [f"{key} is not in the checkpoint" for key in missing if key not in optional]
        wrong += [f"the engine has no {key}" for key in saved if _must_be_wanted(key, wanted)]
        wrong += [text for key in wanted if key in saved for text in _difference(key, wanted[key], saved[key])]
        if wrong:
            rest = f" and {len(wrong) - _NUM_NAMED} more" if len(wrong) > _NUM_NAMED else ""
            raise WeightsError(
                f"{self.folder} does not fit this engine: {'; '.join(wrong[:_NUM_NAMED])}{rest}. Nothing was loaded; "
                "load it into an engine made from the same model, with the same kind of optimizer and adapters, and "
                "the same parameter groups (weight_decay=0 makes fewer)"
            )
        for key in optional:
            _take_out(state, planner.mappings[key])

    def read(self, state: dict[str, Any]) -> None:
        """Fill a state, tensors in place; it fits."""
        planner = DefaultLoadPlanner()
        planner.set_up_planner(state, self.metadata, is_coordinator=True)
        plan = planner.create_local_plan()
        self._storage.set_up_storage_reader(self.metadata, is_coordinator=True)
        self._storage.read_data(planner.finish_plan(plan), planner).wait()


def _is_optional(path: tuple[str | int, ...], saved: dict[str, Any]) -> bool:
    if path[0] in _MAY_BE_MISSING:
        return True
    if path[0] == "schedule":  # torch adds fields now and then; those that are there are enough
        return any(key.startswith("schedule.") for key in saved)
    # A parameter whose gradient was never computed has no state at all; with some of them it is another optimizer.
    if path[:2] == ("optimizer", "state"):
        prefix = ".".join(map(str, path[:3])) + "."
        return "optimizer.param_groups.0.params" in saved and not any(key.startswith(prefix) for key in saved)
    return False


def _must_be_wanted(key: str, wanted: dict[str, Any]) -> bool:
    """Whether something that only the checkpoint has shows that it is another model's, or divided into other groups."""
    if key in wanted:
        return False
    has_groups = any(name.startswith("optimizer.param_groups.") for name in wanted)
    return key.startswith(WEIGHTS) or (has_groups and key.startswith("optimizer.param_groups."))


def _difference(key: str, wanted: Any, saved: Any) -> list[str]:
    is_tensor = isinstance(wanted, torch.Tensor)
    if is_tensor != isinstance(saved, TensorStorageMetadata):
        return [f"{key} is a tensor only in {'the engine' if is_tensor else 'the checkpoint'}"]
    if is_tensor and wanted.shape != saved.size:
        return [f"{key} has shape {tuple(saved.size)} in the checkpoint and {tuple(wanted.shape)} in the engine"]
    return []


def _take_out(state: dict[str, Any], path: tuple[str | int, ...]) -> None:
    """Delete an entry of nested dicts, with those that it leaves empty; an optimizer keeps its ``state``."""
    inner: Any = state
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    if not inner and path[:-1] not in ((), ("optimizer", "state")):
        _take_out(state, path[:-1])
