"""The Engine base class: what a backend implements besides its hooks.

Shape legend: T tokens of a micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.token_output import TokenOutput

__all__ = ["DataParallel", "Engine", "LossFn", "TokenOutput", "WeightShard", "WeightSpec"]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch.distributed as dist

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.contract.engine_config import EngineConfig
    from verl_engine.engine.device import Device


class LossFn(Protocol):
    """A loss; picklable, since it travels to the ranks."""

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss of one micro-batch.

        Returns:
            The SUM over the micro-batch's loss tokens (scalar float32, with gradient through ``output``), and metrics
            by name, each a SUM over the same tokens (scalars, no gradient). Core divides all of them by the number of
            loss tokens of the whole global batch.
        """


@dataclass(frozen=True, slots=True)
class DataParallel:
    """This rank's place among those that hold different data."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    """None only where there is a single rank and no process group."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """Name, shape and dtype of one exported weight."""

    name: str
    """In Hugging Face's naming."""
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class WeightShard:
    """This rank's part of one weight, and where it lies in the whole."""

    name: str
    """As in `WeightSpec`."""
    view_shape: tuple[int, ...]
    """The shape that the whole weight is looked at in: its own, or ``(elements,)`` where an engine shards flat."""
    offsets: tuple[int, ...]
    """Where the part begins in that view, one number a dim."""
    tensor: torch.Tensor
    """The part, detached, maybe empty; with as many dims as the view. Live: copy it to keep it."""


class Engine(ABC):
    """One rank's model with its optimizer and schedule."""

    config: EngineConfig
    device: Device
    data_parallel: DataParallel
    gradient_divisor: int
    """By what the backend's own gradient reduction divides the sum over ranks: the data-parallel size where it
    averages, 1 where it sums. The core multiplies it back, so that no rank count changes the gradient."""
    weights_id: int = 0
    """Changes whenever the weights do; see `note_weights_changed`."""

    @abstractmethod
    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        """Run the model on one micro-batch.

        Collectives: those of the model's parallelism; so each rank must run the same number of forwards.
        """

    @abstractmethod
    def zero_grad(self) -> None:
        """Forget all gradients, those held back by an unfinished accumulation too."""

    @abstractmethod
    def set_training(self, training: bool) -> None:
        """Switch between train and eval mode.

        The model's own dropout is drawn in train mode with ``engine.dropout: model`` only; see `set_train_mode`.
        """

    @abstractmethod
    def weight_specs(self) -> list[WeightSpec]:
        """List what `full_weights` exports, in its order; tied weights once. No collectives."""

    def held_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:  # noqa: ARG002 - for overriding
        """Name the weights that a copy of the model loaded in a narrow dtype holds in another one, such as float32.

        Weight sync and exports cast all others to it. None by default. No collectives.
        """
        return {}

    @abstractmethod
    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole weights one by one, detached; each is valid until the next is taken.

        Collectives: an all-gather a weight; every rank takes all of them, with the same names.
        """

    @abstractmethod
    def save_pretrained(self, folder: Path) -> None:
        """Write config and weights as a Hugging Face folder (safetensors); the first rank writes.

        Collectives: as `full_weights`.
        """

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:  # noqa: ARG002 - for overriding
        """Take whole weights, named as `full_weights` yields them, on every rank; all of them, in any order.

        Feature ``weight_import``. Raises:
            WeightsError: a name or shape that the engine does not have, or a weight that is missing.
        Collectives: may have some a weight.
        """
        raise self._unsupported("weight_import")

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's part of each weight that `weight_specs` lists, in that order.

        Feature ``weight_shards``. Together the ranks' parts cover each weight; replicated ones come from every rank.
        `assemble_weights` puts them together. Every rank takes all of its own.
        Collectives: none, but for merging an adapter, whose own small matrices are gathered.
        """
        raise self._unsupported("weight_shards")

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:  # noqa: ARG002 - for overriding
        """Take parts as `weight_shards` of the same rank yields them, with other values; all of them, in any order.

        Feature ``weight_shards``. Raises:
            WeightsError: a name or place that is not this rank's, or a weight that is missing.
        Collectives: none.
        """
        raise self._unsupported("weight_shards")

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the model without its adapter inside: as the policy it was before training. Feature ``lora``."""
        raise self._unsupported("lora")

    def save_adapter(self, folder: Path) -> None:  # noqa: ARG002 - for overriding
        """Write the adapter alone as a peft folder; the first rank writes. Feature ``lora``.

        Collectives: an all-gather a weight of the adapter.
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

        Feature ``checkpoints``. Tensors may be live; what is sharded comes as DTensors or `TensorParts`. Torch's
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

    def forward_backward(
        self,
        micro_batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        loss_scale: float,
        temperature: float,
        gradient_sync: Callable[[bool], AbstractContextManager[None]],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Accumulate the gradient of ``loss_scale`` times the summed loss over all micro-batches.

        A backend whose schedule interleaves micro-batches overrides it, and still enters `gradient_sync` around each.

        Returns:
            The summed, unscaled loss and the summed metrics of this rank, without gradient.
        """
        total = torch.zeros((), device=self.device.torch_device)
        sums: dict[str, torch.Tensor] = {}
        for index, batch in enumerate(micro_batches):
            with gradient_sync(index == len(micro_batches) - 1):
                loss, metrics = loss_fn(self.forward(batch, temperature), batch)
                (loss * loss_scale).backward()
            total += loss.detach()
            for name, value in metrics.items():
                sums[name] = sums.get(name, torch.zeros_like(total)) + value.detach()
        return total, sums
