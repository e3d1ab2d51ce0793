"""Engines of the mutants whose state is wrong, or belongs to one rank: fsdp2's, with one thing wrong each."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tests.fsdp2_engine import Fsdp2Engine
from verl_engine.contract.errors import ModelError
from verl_engine.engine.weights.module_weights import local_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from verl_fsdp.config import Fsdp2Config


class FolderNotNamed(Fsdp2Engine):
    """Says that there is no model, but not where."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        try:
            return super().made(config, model_folder)
        except ModelError as error:
            raise ModelError("no such model") from error


class TrainsAReference(Fsdp2Engine):
    """Trains whatever it is given."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        return super().made(config.model_copy(update={"forward_only": False}), model_folder)


class SaveIsAStep(Fsdp2Engine):
    """Makes a step of the schedule where it fills an optimizer that never stepped."""

    def state_dict(self) -> dict[str, Any]:
        if not self.optimizer.state:
            self.schedule.last_epoch += 1
        return super().state_dict()


class LoadsIntoZeros(Fsdp2Engine):
    """Gives the weights' memory for another purpose while a checkpoint is looked for."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self.optimizer.state:
            for _, tensor in self.local_weights():
                tensor.zero_()
        return state


class LocalState(Fsdp2Engine):
    """Saves each rank's shards as if they were weights of their own."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        shards = {f"{name}.{dist.get_rank()}": shard for name, shard in local_tensors(self.parameters.items())}
        return {**state, "model": shards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "model": dict(self.parameters)})


class BuffersOfEachRank(Fsdp2Engine):
    """Lets buffers move on each rank by themselves."""

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for name, buffer in self.weights.named_buffers():
            if "running" in name:
                buffer.add_(0.1 * dist.get_rank())


class RanksAlone(Fsdp2Engine):
    """Counts in a group of its own what all data-parallel ranks bring."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        group, _ = dist.new_subgroups(group_size=1)
        engine.data_parallel = dataclasses.replace(engine.data_parallel, group=group)
        return engine
