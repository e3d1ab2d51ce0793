"""The Engine base class: what a backend implements besides its hooks. T is the number of tokens of a micro-batch."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import UnsupportedError
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.device import Device
from verl_engine.engine.micro_batch_pass import LossFn, MicroBatchPass
from verl_engine.engine.process_group import DataParallel
from verl_engine.engine.temperature import Temperature
from verl_engine.engine.token_output import TokenOutput

__all__ = ["DataParallel", "Engine", "LossFn", "MicroBatchPass", "TokenOutput", "WeightShard", "WeightSpec"]


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Name, shape and dtype of one exported weight."""

    name: str
    """In Hugging Face's naming."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's shard of one weight, and where it lies in the full weight."""

    name: str
    """As in `WeightSpec`."""
    view_shape: tuple[int, ...]
    """The shape that the full weight is viewed in: its own, or ``(elements,)`` where an engine shards flat."""
    offsets: tuple[int, ...]
    """Where the shard begins in that view, one number per dim."""
    tensor: torch.Tensor
    """The shard, detached, maybe empty; with as many dims as the view. Live: copy it to keep it."""
    replicas: tuple[int, ...] = ()
    """The ranks of the world that hold this same shard, this one among them, ascending; ``()`` where no other does."""
    is_replica: bool = False
    """Whether a lower rank holds it too: who wants each shard once leaves this one out."""


class Engine(ABC):
    """One rank's model with its optimizer and schedule."""

    config: EngineConfig
    device: Device
    data_parallel: DataParallel
    gradient_divisor: int
    """By what the backend's own gradient reduction divides the sum over ranks: the data-parallel size where it
    averages, 1 where it sums. The core multiplies it back, so that no rank count changes the gradient."""
    vocab_size: int | None = None
    """Token ids of batches are below it; None where the engine does not say, and they are not checked."""
    weights_id: int = 0
    """Changes whenever the weights do; see `note_weights_changed`."""

    @abstractmethod
    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the model on one micro-batch.

        Args:
            batch: on the device.
            temperature: divides the logits before the softmax: a number, or [T] float32, one for each token.
        Collectives: those of the model's parallelism; so each rank must run the same number of forwards, and in each
            call a sharded model equally often, however many sequences it has: once, best.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget all gradients, the unreduced ones of an unfinished accumulation too."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch between train and eval mode.

        The model's own dropout is drawn in train mode with ``engine.dropout: model`` only; see `set_train_mode`.
        """

    @abstractmethod
    def weight_specs(self) -> list[WeightSpec]:
        """List what `full_weights` exports, in its order; tied weights once. No collectives."""

    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:  # noqa: ARG002 - for overriding
        """Return the context of one micro-batch; see ``engine_gradient_sync``. A single rank has nothing to do.

        Raises:
            UnsupportedError: there are several ranks, and it is not overridden.
        """
        if self.data_parallel.size > 1:
            raise self._unsupported("multi_rank")
        return nullcontext()

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        """Clip, step and zero the gradient; see ``engine_optimizer_step``.

        Args:
            learning_rate: used as it is; None for the schedule's.
        """
        raise NotImplementedError(f"{type(self).__name__} must override optimizer_step")

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a snapshot holds, live: this rank's shards of what may change, and all buffers, by any names.

        What may change is what is trained; of a forward-only engine it is everything, by an import of weights. Feature
        ``snapshots``. No collectives.
        """
        raise self._unsupported("snapshots")

    def held_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:  # noqa: ARG002 - for overriding
        """Name the weights that a copy of the model loaded in a narrow dtype holds in another one, such as float32.

        Weight sync and exports cast all others to it. None by default. No collectives.
        """
        return {}

    @abstractmethod
    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights one by one, detached; each is valid until the next is taken.

        Collectives: an all-gather per weight; every rank takes all of them, with the same names.
        """

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Write config and weights as a Hugging Face folder (safetensors); the first rank writes.

        Collectives: as `full_weights`.
        """

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # noqa: ARG002 - for overriding
        """Take full weights, named as `full_weights` yields them, on every rank; all of them, in any order.

        Feature ``weight_import``. Raises:
            WeightsError: a name or shape that the engine does not have, or a weight that is missing.
        Collectives: may have some per weight.
        """
        raise self._unsupported("weight_import")

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's shard of each weight that `weight_specs` lists, in that order.

        Feature ``weight_shards``. Together the ranks' shards cover each weight; replicated ones come from every rank.
        `assemble_weights` puts them together. Every rank takes all of its own.
        Collectives: none, but for merging an adapter, whose own small matrices are gathered.
        """
        raise self._unsupported("weight_shards")

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:  # noqa: ARG002 - for overriding
        """Take shards as `weight_shards` of the same rank yields them, with other values; all of them, in any order.

        Feature ``weight_shards``. Raises:
            WeightsError: a name or offsets that are not this rank's, or a weight that is missing.
        Collectives: none.
        """
        raise self._unsupported("weight_shards")

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the model without its adapter inside: as the policy it was before training. Feature ``lora``."""
        raise self._unsupported("lora")

    def save_adapter(self, folder: Path) -> None:  # noqa: ARG002 - for overriding
        """Write the adapter alone as a peft folder; the first rank writes. Feature ``lora``.

        Collectives: an all-gather per weight of the adapter.
        """
        raise self._unsupported("lora")

    def adapter_specs(self) -> list[WeightSpec]:
        """List the adapter's own weights under peft's names, which `full_weights` yields too, unmerged.

        Feature ``lora``. For who holds the model that training started from: names and values are those of
        `save_adapter`'s file. What else is trained, such as a value head, is among them. No collectives.
        """
        raise self._unsupported("lora")

    def adapter_config(self) -> dict[str, Any]:
        """Return what `save_adapter` writes into ``adapter_config.json``, for who loads `adapter_specs`' weights.

        Feature ``lora``. No collectives.
        """
        raise self._unsupported("lora")

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU, freeing the device, or back to it. Feature ``offload``.

        Args:
            to_cpu: which way. On return all copies are complete: the host may read what was moved.
            parameters: the weights, with the buffers.
            gradients: those of an accumulation, if there are any.
            optimizer: its state.
        """
        del to_cpu, parameters, gradients, optimizer
        raise self._unsupported("offload")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training goes on from: weights, optimizer, schedule.

        Feature ``checkpoints``. Tensors may be live; what is sharded comes as DTensors or `TensorShards`. Torch's
        distributed checkpoints write what each rank has, and fill the same structure in place when they load. So it is
        complete before the first step too, and names the same on every rank. Weights are under ``model``, by Hugging
        Face names, tied ones once; ``optimizer`` is as torch's `get_optimizer_state_dict` gives it. ``buffers`` and
        ``loss_scaler`` may be missing in what is loaded.
        """
        raise self._unsupported("checkpoints")

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: ARG002 - for overriding
        """Take a state as `state_dict` returns it, with other values. Feature ``checkpoints``."""
        raise self._unsupported("checkpoints")

    def note_weights_changed(self) -> None:
        """Record that the weights are others than before; core's drivers and whatever loads weights call it."""
        self.weights_id += 1

    def _unsupported(self, feature: str) -> UnsupportedError:
        return UnsupportedError(
            f"engine backend {self.config.backend!r} lacks {feature!r}: it does not override the method, so its "
            "BackendSpec must declare the gap"
        )

    def forward_backward(self, run: MicroBatchPass) -> None:
        """Accumulate the gradient of the scaled loss over all micro-batches; results go to ``run.totals``.

        A backend whose schedule interleaves micro-batches overrides it, still enters the context of each, and calls
        ``run.loss`` once for each micro-batch.
        """
        for batch, sync in run:
            with sync:
                self.backward(run.loss(self.forward(batch, run.temperature(batch)), batch) * run.loss_scale)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of one micro-batch's scaled loss to what is accumulated.

        For overriding; not called where a schedule of the backend's own runs the backward.
        """
        loss.backward()
