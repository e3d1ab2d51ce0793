"""The fsdp engine: a Hugging Face model under PyTorch ``FullyShardedDataParallel`` (FSDP1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from verl_engine.engine.train_mode import set_train_mode
from verl_engine.engine.weights.module_weights import Exported
from verl_fsdp.engine import ShardedEngine
from verl_fsdp.fsdp1.flat_unit import flat_units
from verl_fsdp.fsdp1.gradient_sync import (
    forget_gradients,
    gradient_sync,
    initialize,
    recover_from_abandoned_pass,
    reshard,
)
from verl_fsdp.fsdp1.offload import FlatGradientSlot, FlatOffload
from verl_fsdp.fsdp1.parallelize import shard
from verl_fsdp.fsdp1.state import load_model_state, load_optimizer_state, model_state, optimizer_state
from verl_fsdp.fsdp1.weight_table import clean_name
from verl_fsdp.fsdp1.weights import FlatWeights
from verl_fsdp.model.lora import low_rank_exports
from verl_fsdp.update.grad_norm import clip_gradients, grad_norm
from verl_fsdp.update.held_gradients import choose_sync
from verl_fsdp.update.optimizer import require_entrywise

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch.distributed.fsdp import FullyShardedDataParallel
    from transformers import PreTrainedModel

    from verl_engine.engine.base import WeightShard
    from verl_engine.engine.device import Device
    from verl_engine.engine.offload import GradientSlot
    from verl_fsdp.config import FsdpConfig, ShardedConfig
    from verl_fsdp.fsdp1.weight_table import WeightTable


class Fsdp1Engine(ShardedEngine):
    """See `ShardedEngine`.

    Weights lie in flat tensors, one for each wrapped module, cut evenly over ranks: so a rank's shard of a parameter
    is a vector, and may be empty. Names, shapes and dtypes outside are those of the model before it was wrapped.
    """

    config: FsdpConfig
    model: FullyShardedDataParallel
    _table: WeightTable

    def __init__(self, config: FsdpConfig, model_folder: Path) -> None:
        """Build the engine; see the base class. Collectives: for ``gradient_sync: auto`` an all-reduce more.

        Raises:
            ConfigError: the optimizer looks at more than one entry of a parameter at a time.
        """
        if not config.forward_only:
            require_entrywise(config)
        super().__init__(config, model_folder)
        self.module = self.model.module  # transformers' own, with config and save_pretrained
        self.parameters = self.shards()
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        units = flat_units(self.model, names, self.device.torch_device)
        mesh = self.meshes.weights
        replicas = mesh.mesh.reshape(-1, mesh["shard"].size())[:, mesh.get_local_rank("shard")].tolist()
        self.weights = FlatWeights(self._table, units, dict(self.buffers()), replicas)
        self.sync = choose_sync(
            config,
            # One frozen parameter beside a trained one has a gradient too, which nobody looks at.
            sum(unit.numel for unit in units if any(member.parameter.requires_grad for member in unit.members)),
            self.meshes.weights["shard"].size(),
            self.device,
            must_reduce="" if config.param_dtype == "float32" else "FSDP1 holds gradients in param_dtype",
        )
        """When gradients are reduced, and why."""

    def shard(self, model: PreTrainedModel, config: ShardedConfig, device: Device) -> torch.nn.Module:
        """Wrap the model; see the base class."""
        root, self._table = shard(model, cast("FsdpConfig", config), self.meshes.weights, device.torch_device)
        initialize(root)
        return root

    def shards(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's piece of each parameter; see the base class."""
        return {clean_name(name): parameter for name, parameter in self.model.named_parameters()}

    def set_training(self, training: bool) -> None:
        """Switch between train and eval mode."""
        set_train_mode(self.model, training=training, dropout=self.config.dropout == "model")

    def reshard(self) -> None:
        """Free whatever is gathered; see the base class."""
        reshard(self.model)

    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Hold gradients back until the last micro-batch, unless that was not the choice."""
        return gradient_sync(self.model, reduce=is_last_micro_batch or self.sync.every_micro_batch)

    def recover(self) -> None:
        """Forget an unfinished pass; see the base class."""
        self.device.synchronize()  # what is under way on FSDP1's own streams uses what is freed now
        recover_from_abandoned_pass(self.model)

    def drop_gradients(self) -> None:
        """Forget the gradients, the unreduced ones too."""
        super().drop_gradients()
        forget_gradients(self.model)

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all ranks; see the base class."""
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        parameters = list(self.parameters.values())
        copies = dist.get_world_size() // self.meshes.weights["shard"].size()
        norm = grad_norm(parameters, None, plain_copies=copies, device=self.device.torch_device)
        return clip_gradients(parameters, norm, self.config.max_grad_norm, scale)

    def exported(self) -> dict[str, Exported]:
        """Say what each exported weight is made of, as meta tensors; adapters are merged in."""
        exported = self.weights.exported()
        return low_rank_exports(exported, self.config.lora) if self.config.lora is not None else exported

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights; see the base class, and `FlatWeights.full`."""
        exported = self.exported()
        return self.weights.full((name, exported[name]) for name in names)

    def full_trained(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights of what is trained, by the module's own names."""
        trained = (name for name, parameter in self.parameters.items() if parameter.requires_grad)
        return self.weights.full((name, Exported(self._table.parameters[name])) for name in trained)

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take full weights; see the base class."""
        self.reshard()  # or what is gathered would go on being used
        try:
            self.weights.load_full(self.exported(), weights)
        finally:
            self.note_weights_changed()  # those before a misfit are in

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's pieces; see the base class, and `FlatWeights.shards`."""
        return self.weights.shards(self.exported())

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:
        """Take this rank's pieces; see the base class."""
        self.reshard()
        try:
            self.weights.load_shards(self.exported(), shards)
        finally:
            self.note_weights_changed()

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU or back; see the base class."""
        self.reshard()
        if self._offload is None:
            self._offload = FlatOffload(self.model, self.weights.units, self._optimizer, self.device)
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield the places of gradients: the flat ones, which the parameters' are views of."""
        return (FlatGradientSlot(unit.handle) for unit in self.weights.units)

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from, with the keys that fsdp2 has; see the base class.

        Takes the memory of one more shard of weights and optimizer state: FSDP1 cuts them elsewhere than DTensors are.
        Collectives: an all-gather per unit, and for the optimizer one per unit and key.
        """
        self.reshard()
        mesh = self.meshes.weights
        saved = self.weights.buffers
        state: dict[str, Any] = {
            "model": model_state(self.weights, mesh),
            "buffers": {name: buffer.detach() for name, buffer in self.buffers() if name not in saved},
        }
        if self._optimizer is not None:
            state["optimizer"] = optimizer_state(self.weights, self._optimizer, mesh)
        others = self._stateful().items()
        return state | {name: other.state_dict() for name, other in others if other is not None}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state, of fsdp2 too; see the base class. Collectives: an all-gather per sharded tensor."""
        self.reshard()
        load_model_state(self.weights, state["model"])
        buffers = dict(self.buffers())
        for name, value in state.get("buffers", {}).items():
            buffers[name].copy_(value)
        if self._optimizer is not None:
            load_optimizer_state(self.weights, self._optimizer, state["optimizer"])
        for name, other in self._stateful().items():
            if other is not None and name in state:
                other.load_state_dict(state[name])
        self.note_weights_changed()
        self.apply_configured_settings()

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield all buffers, live, by the names they had before wrapping."""
        return ((clean_name(name), buffer) for name, buffer in self.model.named_buffers())
