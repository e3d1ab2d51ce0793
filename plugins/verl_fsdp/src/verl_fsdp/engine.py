"""What the backends share: a Hugging Face model, sharded over ranks, and its forward.

`verl_fsdp.fsdp2.engine` and `verl_fsdp.fsdp1.engine` say how it is sharded, and what follows from that.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.device import Device
from verl_engine.engine.loss_scaler import LossScaler
from verl_engine.engine.module_engine import ModuleEngine
from verl_engine.engine.weights.module_weights import Exported, full_weights
from verl_fsdp.forward.head import make_head
from verl_fsdp.forward.micro_batch import forward
from verl_fsdp.mesh import build_meshes
from verl_fsdp.model.loading import load_model
from verl_fsdp.model.lora import adapters_disabled, low_rank_exports, save_adapter
from verl_fsdp.model.packable import is_packed
from verl_fsdp.model.rotary import PositionUse, rotary_limit
from verl_fsdp.update.optimizer import build_optimizer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from transformers import PreTrainedModel

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import WeightShard
    from verl_engine.engine.temperature import Temperature
    from verl_engine.engine.token_output import TokenOutput
    from verl_fsdp.config import ShardedConfig, TorchShardedConfig
    from verl_fsdp.mesh import Meshes


class ShardedEngine(ModuleEngine):
    """One rank's shard of the model with its shard of the optimizer's state."""

    config: ShardedConfig
    is_packed: bool
    """Whether sequences lie end to end; not for every model, whatever the config says."""

    def __init__(self, config: ShardedConfig, model_folder: Path) -> None:
        """Load and shard the model, build the optimizer. Collectives: of device meshes, a broadcast per weight."""
        device = Device.resolve(config.device, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
        self.meshes = self.divide_ranks(config, device)
        model = self.load(config, model_folder)
        self.is_packed = is_packed(model)
        self.head = make_head(model, config)
        self._rotary_limit = rotary_limit(model)
        self._positions = PositionUse.of(model)
        num_dims = {name: parameter.ndim for name, parameter in model.named_parameters()}
        self.model = self.shard(model, config, device)
        optimizer = None if config.forward_only else build_optimizer(self.shards(), config, device, num_dims)
        super().__init__(config, device, self.model, self.meshes.data_parallel, optimizer)
        self.loss_scaler = LossScaler() if config.param_dtype == "float16" and not config.forward_only else None
        # The ranks that split a sequence have its gradient in parts, so theirs is averaged over them too.
        self.gradient_divisor = dist.get_world_size()

    def divide_ranks(self, config: ShardedConfig, device: Device) -> Meshes:
        """Say who shares weights and data; overridden where others divide the ranks. Collectives: those of meshes."""
        return build_meshes(cast("TorchShardedConfig", config), device.kind)

    def load(self, config: ShardedConfig, model_folder: Path) -> PreTrainedModel:
        """Load the model, with weights on rank 0 only; see `load_model`."""
        return load_model(config, model_folder)

    @abstractmethod
    def shard(self, model: PreTrainedModel, config: ShardedConfig, device: Device) -> torch.nn.Module:
        """Shard the model over ``self.meshes.weights``, and return what is to be called in its place."""

    def shards(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's shard of each parameter, by the name that it had before it was sharded."""
        return dict(self.model.named_parameters())

    def place(self, module: torch.nn.Module) -> torch.nn.Module:
        """Leave it where sharding put it: shards may have to stay on the CPU."""
        return module

    @abstractmethod
    def reshard(self) -> None:
        """Free whatever is gathered. Harmless at any time between a forward and the next."""

    @abstractmethod
    def recover(self) -> None:
        """Get ready for a forward after an exception in the middle of a pass; gradients stay. Always harmless."""

    @abstractmethod
    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """See ``engine_gradient_sync``."""

    def zero_grad(self) -> None:
        """Forget all gradients, and an unfinished pass; see the base class."""
        self.recover()
        self.drop_gradients()

    def exported(self) -> dict[str, Exported]:
        """Say what each exported weight is made of; adapters are merged in, and names are those of a plain model."""
        exported = super().exported()
        return low_rank_exports(exported, self.config.lora) if self.config.lora is not None else exported

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's live shards of what may change, and all buffers."""
        self.reshard()
        return super().local_weights()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from; see the base class."""
        self.reshard()
        return super().state_dict()

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take full weights; see the base class."""
        self.reshard()  # or what is gathered would go on being used
        super().load_full_weights(weights)

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:
        """Take this rank's shards; see the base class."""
        self.reshard()
        super().load_weight_shards(shards)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run as the model that the folder holds; see the base class.

        Raises:
            UnsupportedError: the engine has no adapter.
        """
        self._require_lora()
        return adapters_disabled(self.model)

    def save_adapter(self, folder: Path) -> None:
        """Write what is trained, the adapter and maybe a value head, as a peft folder; see the base class.

        Raises:
            UnsupportedError: the engine has no adapter.
        """
        self._require_lora()
        save_adapter(self.model, self.full_trained(), folder)

    def full_trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights of what is trained, by the module's own names. Collectives: an all-gather per weight."""
        trained = {name: Exported(entry) for name, entry in self.parameters.items() if entry.requires_grad}
        return full_weights(trained, list(trained))

    def run(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on a micro-batch; what `forward` does but for the clearing up after it."""
        return forward(self.model, self.head, batch, temperature, self.meshes.sequence, is_packed=self.is_packed)

    def _require_lora(self) -> None:
        if self.config.lora is None:
            raise UnsupportedError("engine.lora is not set: this engine has no adapter")

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on a micro-batch, packed or padded as configured; see the base class.

        Raises:
            ModelError: a sequence is so long that the model would change the log-probs of those beside it, or has
                positions that the model does not take.
        """
        if self._rotary_limit is not None:
            highest = int(batch.position_ids.max()) + 1 if batch.has_own_positions else 0
            self._rotary_limit.check((*batch.lengths, highest))
        if batch.has_own_positions:
            self._positions.check(batch.position_ids)
        try:
            output = self.run(batch, temperature)
        except BaseException:
            self.recover()  # nobody calls zero_grad after a failed inference, and FSDP1 would not run again
            raise
        if not torch.is_grad_enabled():
            self.reshard()  # without a backward nothing else would free the root's gathered parameters
        return output
