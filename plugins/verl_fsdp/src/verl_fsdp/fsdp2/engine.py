"""The fsdp2 engine: a Hugging Face model under PyTorch ``fully_shard``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from verl_fsdp.engine import ShardedEngine
from verl_fsdp.fsdp2.gradient_sync import forget_gradients, gradient_sync, recover_from_abandoned_pass
from verl_fsdp.fsdp2.parallelize import shard
from verl_fsdp.grad_norm import clip_gradients, grad_norm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    import torch
    from torch.distributed.fsdp import FSDPModule
    from transformers import PreTrainedModel

    from verl_engine.engine.device import Device
    from verl_fsdp.config import Fsdp2Config, ShardedConfig


class Fsdp2Engine(ShardedEngine):
    """See `ShardedEngine`."""

    config: Fsdp2Config

    def shard(self, model: PreTrainedModel, config: ShardedConfig, device: Device) -> torch.nn.Module:
        """Apply fully_shard; see the base class."""
        del device
        return cast("torch.nn.Module", shard(model, cast("Fsdp2Config", config), self.meshes.weights))

    def reshard(self) -> None:
        """Free the root's parameters, which fully_shard keeps; blocks free their own."""
        self._root.reshard()

    def gradient_sync(self, *, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Hold gradients back until the last micro-batch, unless configured otherwise."""
        return gradient_sync(self._root, reduce=is_last_micro_batch or self.config.gradient_sync == "every_micro_batch")

    def zero_grad(self) -> None:
        """Forget all gradients; see the base class."""
        recover_from_abandoned_pass(self._root)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients, those held back for a later reduction too."""
        forget_gradients(self._root, self.parameters.values())

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all ranks; see the base class."""
        norm = grad_norm(self.parameters.values(), self.data_parallel.group)
        clip_gradients(self.parameters.values(), norm, self.config.max_grad_norm)
        return norm

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's live shards of what is trained, and all buffers."""
        self.reshard()
        return super().local_weights()

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU or back; see the base class."""
        self.reshard()
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from; see the base class."""
        self.reshard()
        return super().state_dict()

    @property
    def _root(self) -> FSDPModule:
        return cast("FSDPModule", self.model)
