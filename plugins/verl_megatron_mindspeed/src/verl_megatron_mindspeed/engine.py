"""The megatron engine: a Megatron-core model of a Hugging Face folder, under Megatron's own schedules.

`verl_megatron_mindspeed.build` says of which parts it is made.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import UnsupportedError
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.base import Engine, MicroBatchPass, WeightShard, WeightSpec
from verl_engine.engine.device import Device
from verl_engine.engine.temperature import Temperature
from verl_engine.engine.token_output import TokenOutput
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.forward.schedule import Schedule
from verl_megatron_mindspeed.mindspeed.fp8_weights import reset_weight_caches
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.parallel import Parallel
from verl_megatron_mindspeed.update.checkpoint import load_state, training_state
from verl_megatron_mindspeed.update.offload import Offload
from verl_megatron_mindspeed.update.training import Training
from verl_megatron_mindspeed.weights.weight_map import WeightMap


class MegatronEngine(Engine):
    """One rank's part of the model, with its part of the optimizer's state."""

    config: MegatronConfig
    gradient_divisor = 1  # with calculate_per_token_loss Megatron sums over the data-parallel ranks

    def __init__(
        self,
        config: MegatronConfig,
        device: Device,
        parallel: Parallel,
        model: MegatronModel,
        weights: WeightMap,
        training: Training | None,
        schedule: Schedule,
    ) -> None:
        """Put the parts together; a forward-only engine has no `training`."""
        self.config = config
        self.device = device
        self.data_parallel = parallel.data
        self.parallel = parallel
        """Put in place while Megatron runs: other engines of the process may divide the ranks otherwise."""
        self.model = model
        self.vocab_size = model.vocab_size
        self.weights = weights
        self.schedule = schedule
        self._training = training
        self._offload = Offload(model, training, device)

    @property
    def training(self) -> Training:
        """Gradient buffers, optimizer and learning-rate schedule; UnsupportedError where the engine is forward-only."""
        if self._training is None:
            raise UnsupportedError("engine.forward_only=true: this engine has no optimizer and cannot train")
        return self._training

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on a micro-batch, without gradient; all ranks with the same data get the output.

        Collectives: those of the model's parallelism, and a broadcast from the last pipeline stage.
        """
        self._offload.require("parameters")
        with self.parallel.in_use():
            return self.schedule.infer(batch, temperature)

    def forward_backward(self, run: MicroBatchPass) -> None:
        """Accumulate the gradient through Megatron's schedule; see the base class."""
        self._offload.require("parameters", "gradients")
        with self.parallel.in_use():
            self.model.reseed_dropout()
            self.schedule.train(self.training, run)

    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """See ``engine_gradient_sync``."""
        return self.training.gradients.sync(is_last_micro_batch=is_last_micro_batch)

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        """Clip and step, or skip when the norm is not finite; see ``engine_optimizer_step``."""
        self._offload.require("parameters", "gradients", "optimizer")
        with self.parallel.in_use():
            return self.training.step(learning_rate)

    def zero_grad(self) -> None:
        """Forget all gradients, and an unfinished pass; see the base class."""
        if self._training is not None:
            self._training.zero_grad()

    def set_training(self, training: bool) -> None:
        """Switch between train and eval mode."""
        for chunk in self.model.chunks:
            chunk.train(training)

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a snapshot holds, live: this rank's weights, their float32 masters, and buffers."""
        self._settle()
        for index, chunk in enumerate(self.model.chunks):
            for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
                yield f"{index}.{name}", tensor.detach()
        if self._training is not None:
            yield from self._training.masters()

    def weight_specs(self) -> list[WeightSpec]:
        """List the exported weights."""
        return self.weights.specs()

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights; see the base class. Collectives: a broadcast from each rank that has a shard."""
        self._settle()
        return self.weights.full_weights(names)

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's shards; those that other ranks hold come empty. See the base class."""
        self._settle()
        return self.weights.weight_shards()

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take full weights; see the base class. No collectives."""
        self._settle()
        training = self._training
        masters = training.held_master if training is not None and training.has_masters else None
        try:
            self.weights.load_full_weights(weights, masters)
        finally:
            self.note_weights_changed()  # those before a misfit are in

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:
        """Take this rank's parts; see the base class."""
        self._settle()
        try:
            self.weights.load_weight_shards(shards)
        finally:
            if self._training is not None:
                self._training.take_masters_from_model()
            self.note_weights_changed()

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder; see the base class."""
        self._settle()
        self.weights.save_pretrained(folder)

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU or back; see the base class. No collectives."""
        self._settle()
        self._offload.move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)
        reset_weight_caches()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from; see the base class."""
        self._settle()
        return training_state(self.model, self.weights, self._training)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state; see the base class."""
        self._offload.require("parameters")
        load_state(self.model, self.weights, self._training, state)
        self.note_weights_changed()

    def note_weights_changed(self) -> None:
        """See the base class."""
        super().note_weights_changed()
        reset_weight_caches()

    def _settle(self) -> None:
        """Wait until the weights are those of the last step, which may be gathered while the next forward runs."""
        if self._training is not None:
            self._training.gather_parameters()
