"""The engine of all backends here: a Hugging Face model, sharded over ranks, and its forward.

`verl_fsdp.fsdp2.build` and `verl_fsdp.fsdp1.build` say how it is sharded, and which parts follow from that.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.base import DataParallel, WeightSpec
from verl_engine.engine.device import Device
from verl_engine.engine.loss_scaler import LossScaler
from verl_engine.engine.module_engine import ModuleEngine
from verl_engine.engine.offload import GradientSlot
from verl_engine.engine.temperature import Temperature
from verl_engine.engine.token_output import TokenOutput
from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_engine.engine.weights.module_weights import Exported, weight_specs
from verl_fsdp.config import ShardedConfig
from verl_fsdp.forward.micro_batch import MicroBatchForward
from verl_fsdp.model.lora import adapter_config, adapters_disabled, low_rank_exports, peft_name, save_adapter
from verl_fsdp.update.held_gradients import SyncChoice
from verl_fsdp.update.optimizer import build_optimizer


class Passes(Protocol):
    """What whoever shards a model keeps between a forward and the optimizer's step."""

    def gradient_sync(self, *, reduce: bool, is_last: bool) -> AbstractContextManager[None]:
        """Reduce gradients in the backward inside, or keep each rank's own; see `FullyShardedPasses`."""

    def reshard(self) -> None:
        """Free whatever is gathered. Harmless at any time between a forward and the next."""

    def recover(self) -> None:
        """Get ready for a forward after an exception in the middle of a pass; gradients stay. Always harmless."""

    def forget_gradients(self) -> None:
        """Drop every gradient, the unreduced ones of an unfinished accumulation too."""

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield the places of all gradients, unreduced ones too."""


class ShardedEngine(ModuleEngine):
    """One rank's shard of the model with its shard of the optimizer's state."""

    config: ShardedConfig

    def __init__(
        self,
        config: ShardedConfig,
        device: Device,
        data_parallel: DataParallel,
        model_forward: MicroBatchForward,
        weights: EngineWeights,
        passes: Passes,
        sync: SyncChoice,
        clip: Callable[[float], torch.Tensor],
    ) -> None:
        """Put the parts together, and build the optimizer; `clip` is given the gradients' scale. No collectives."""
        optimizer = None
        if not config.forward_only:
            num_dims = {name: entry.tensor.ndim for name, entry in weights.exported().items()}
            optimizer = build_optimizer(weights.parameters, config, device, num_dims)
        super().__init__(config, device, weights.plain, data_parallel, optimizer, weights)
        self.model = weights.module
        """What is called in a forward."""
        self.model_forward = model_forward
        self.passes = passes
        self.sync = sync
        self._clip = clip
        self.loss_scaler = LossScaler() if config.param_dtype == "float16" and not config.forward_only else None
        # The ranks that split a sequence have its gradient in parts, so theirs is averaged over them too.
        self.gradient_divisor = dist.get_world_size()

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on a micro-batch, packed or padded as configured; see `MicroBatchForward`."""
        try:
            output = self.model_forward(self.model, batch, temperature)
        except BaseException:
            self.passes.recover()  # nobody calls zero_grad after a failed inference, and FSDP1 would not run again
            raise
        if not torch.is_grad_enabled():
            self.passes.reshard()  # without a backward nothing else would free the root's gathered parameters
        return output

    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Defer the reduction to the last micro-batch, unless that was not the choice."""
        reduce = is_last_micro_batch or self.sync.mode == "every_micro_batch"
        return self.passes.gradient_sync(reduce=reduce, is_last=is_last_micro_batch)

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all ranks; see the base class."""
        return self._clip(1.0 if self.loss_scaler is None else self.loss_scaler.scale)

    def zero_grad(self) -> None:
        """Forget all gradients, and an unfinished pass; see the base class."""
        self.passes.recover()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients, the unreduced ones too."""
        super().drop_gradients()
        self.passes.forget_gradients()

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield the places of gradients, the unreduced ones too."""
        return self.passes.gradient_slots()

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU or back; see the base class. No effect where they stay on the CPU."""
        if not self.config.stays_on_cpu:
            super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)

    def exported(self) -> dict[str, Exported]:
        """Say what each exported weight is made of; adapters are merged in, and names are those of a plain model."""
        exported = super().exported()
        return low_rank_exports(exported, self.config.lora) if self.config.lora is not None else exported

    def exported_adapter(self) -> dict[str, Exported]:
        """Say what is trained, the adapter and maybe a value head, under peft's names; UnsupportedError without one."""
        self._require_lora()
        trained = {name for name, parameter in self.parameters.items() if parameter.requires_grad}
        return {peft_name(name): entry for name, entry in self.weights.exported().items() if name in trained}

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights, maybe an adapter's own; see the base class."""
        own = {} if self.config.lora is None else self.exported_adapter()
        return self.weights.full(self.exported() | own, names)

    def _settle(self) -> None:
        self.passes.reshard()

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run as the model that the folder holds; see the base class."""
        self._require_lora()
        return adapters_disabled(self.model)

    def save_adapter(self, folder: Path) -> None:
        """Write what is trained, the adapter and maybe a value head, as a peft folder; see the base class."""
        save_adapter(self.model, self.full_weights([spec.name for spec in self.adapter_specs()]), folder)

    def adapter_specs(self) -> list[WeightSpec]:
        """List what `save_adapter` writes; see the base class."""
        return weight_specs(self.exported_adapter())

    def adapter_config(self) -> dict[str, Any]:
        """Say what the adapter was made with; see the base class."""
        self._require_lora()
        return adapter_config(self.model)

    def _require_lora(self) -> None:
        if self.config.lora is None:
            raise UnsupportedError("engine.lora is not set: this engine has no adapter")


def device_of_rank(config: ShardedConfig) -> Device:
    """Choose this rank's device."""
    return Device.resolve(config.device, int(os.environ.get("LOCAL_RANK", dist.get_rank())))
