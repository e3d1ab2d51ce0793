"""What both backends share: a Hugging Face model, sharded over ranks, and its forward.

`verl_fsdp.fsdp2.engine` and `verl_fsdp.fsdp1.engine` say how it is sharded, and what follows from that.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verl_engine.engine.device import Device
from verl_engine.engine.module_engine import ModuleEngine
from verl_fsdp.forward import forward
from verl_fsdp.mesh import build_meshes
from verl_fsdp.model import load_model

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from transformers import PreTrainedModel

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.token_output import TokenOutput
    from verl_fsdp.config import ShardedConfig


class ShardedEngine(ModuleEngine):
    """One rank's shard of the model with its part of the optimizer's state."""

    config: ShardedConfig

    def __init__(self, config: ShardedConfig, model_folder: Path) -> None:
        """Load the model, shard it, build the optimizer. Collectives: those of device meshes, a broadcast a weight."""
        device = Device.resolve(config.device, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        self.meshes = build_meshes(config, device.kind)
        self.model = self.shard(load_model(config, model_folder), config, device)
        super().__init__(config, device, self.model, self.meshes.data_parallel)
        # The ranks that split a sequence have its gradient in parts, so theirs is averaged over them too.
        self.gradient_divisor = dist.get_world_size()

    @abstractmethod
    def shard(self, model: PreTrainedModel, config: ShardedConfig, device: Device) -> torch.nn.Module:
        """Shard the model over ``self.meshes.weights``, and return what is to be called in its place."""

    @abstractmethod
    def reshard(self) -> None:
        """Free whatever is gathered. Harmless at any time between a forward and the next."""

    @abstractmethod
    def gradient_sync(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """See ``engine_gradient_sync``."""

    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        """Run the model on a micro-batch, packed or padded as configured; see the base class."""
        output = forward(self.model, self.config, batch, temperature, self.meshes.sequence)
        if not torch.is_grad_enabled():
            self.reshard()  # without a backward nothing else would free the root's gathered parameters
        return output
