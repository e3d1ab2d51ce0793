"""The fsdp2 engine: a Hugging Face model under PyTorch ``fully_shard``. And what is true of any such model."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch.distributed as dist

from verl_fsdp.engine import ShardedEngine
from verl_fsdp.fsdp2.gradient_sync import (
    forget_gradients,
    fsdp_modules,
    gradient_sync,
    held_gradient_slots,
    recover_from_abandoned_pass,
)
from verl_fsdp.fsdp2.parallelize import shard
from verl_fsdp.update.grad_norm import clip_gradients, grad_norm
from verl_fsdp.update.held_gradients import SyncChoice, choose_sync

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    from verl_engine.engine.device import Device
    from verl_engine.engine.offload import GradientSlot
    from verl_fsdp.config import Fsdp2Config, ShardedConfig


class FullyShardedEngine(ShardedEngine):
    """A model whose root and blocks were given to ``fully_shard``, by whoever; see `ShardedEngine`."""

    sync: SyncChoice
    """When gradients are reduced, and why."""

    @property
    def stays_on_cpu(self) -> bool:
        """Whether weights, gradients and optimizer state lie on the CPU at all times."""
        return False

    @property
    def keeps_unsharded(self) -> bool:
        """Whether parameters stay gathered from the first micro-batch to the last."""
        return False

    def reshard(self) -> None:
        """Free what fully_shard keeps: the root's parameters, and with ``reshard_after_forward: false`` the blocks'.

        Kept beyond a forward without backward, they would go on being used when others were restored or loaded.
        """
        for module in fsdp_modules(self._root):
            module.reshard()

    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Hold gradients back until the last micro-batch, unless that was not the choice."""
        return gradient_sync(
            self._root,
            reduce=is_last_micro_batch or self.sync.every_micro_batch,
            keep_unsharded=self.keeps_unsharded,
            is_last=is_last_micro_batch,
        )

    def recover(self) -> None:
        """Forget an unfinished pass; see the base class."""
        recover_from_abandoned_pass(self._root)

    def drop_gradients(self) -> None:
        """Forget the gradients, the unreduced ones too."""
        super().drop_gradients()
        forget_gradients(self._root, self.parameters.values())

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all ranks; see the base class."""
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        parameters = list(self.parameters.values())
        norm = grad_norm(parameters, None, plain_copies=dist.get_world_size(), device=self.device.torch_device)
        return clip_gradients(parameters, norm, self.config.max_grad_norm, scale)

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU or back; see the base class. No effect where they stay on the CPU."""
        if self.stays_on_cpu:
            return
        if parameters:
            self.reshard()
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield the places of gradients, the unreduced ones too."""
        yield from super().gradient_slots()
        yield from held_gradient_slots(self._root)

    @property
    def _root(self) -> FSDPModule:
        return cast("FSDPModule", self.model)


class Fsdp2Engine(FullyShardedEngine):
    """The engine of the backend fsdp2."""

    config: Fsdp2Config

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        """Build the engine; see the base class. Collectives: for ``gradient_sync: auto`` an all-reduce more."""
        super().__init__(config, model_folder)
        num_trained = sum(parameter.numel() for parameter in self.parameters.values() if parameter.requires_grad)
        self.sync = choose_sync(config, num_trained, self.meshes.weights["shard"].size(), self.device)

    def shard(self, model: PreTrainedModel, config: ShardedConfig, device: Device) -> torch.nn.Module:
        """Apply fully_shard; see the base class."""
        sharded = shard(model, cast("Fsdp2Config", config), self.meshes.weights, device.torch_device)
        return cast("torch.nn.Module", sharded)

    @property
    def stays_on_cpu(self) -> bool:
        """Whether ``cpu_offload`` was asked for."""
        return self.config.cpu_offload

    @property
    def keeps_unsharded(self) -> bool:
        """Whether ``keep_unsharded`` was asked for."""
        return self.config.keep_unsharded
