"""One pass over a rank's micro-batches, forward and backward: what it takes, and what comes of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.metrics import Metric, Totals
from verl_engine.engine.temperature import Temperature, temperature_of
from verl_engine.engine.token_output import TokenOutput


class LossFn(Protocol):
    """A loss; picklable, since it travels to the ranks."""

    def __call__(
        self, output: TokenOutput, batch: PackedBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor | Metric]]:
        """Compute the loss of one micro-batch.

        Returns:
            The SUM over the micro-batch's loss tokens (scalar float32, with gradient through ``output``), and metrics
            by name, the same for each micro-batch: plain scalars are SUMS too, a `Metric` says how it is reduced. Core
            divides all sums by the normaliser of the whole global batch, by default its number of loss tokens.
        """


class MicroBatchPass:
    """What `Engine.forward_backward` takes: the micro-batches, what to do with each, and where the results go."""

    def __init__(
        self,
        micro_batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        gradient_sync: Callable[[bool], AbstractContextManager[None]],
        *,
        loss_scale: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        """Prepare a pass; nothing runs yet.

        Args:
            micro_batches: this rank's, at least one.
            loss_fn: of each.
            gradient_sync: makes the context of a micro-batch, given whether it is the last.
            loss_scale: the gradient is that of so many times the summed loss.
            temperature: divides the logits before the softmax, where sequences have no field of this name.
        """
        self.micro_batches = micro_batches
        self.gradient_sync = gradient_sync
        self.loss_scale = loss_scale
        self.totals = Totals(micro_batches[0].input_ids.device)
        """What `loss` has added up: the unscaled loss and the metrics."""
        self._loss_fn = loss_fn
        self._temperature = temperature

    def __iter__(self) -> Iterator[tuple[PackedBatch, AbstractContextManager[None]]]:
        """Yield each micro-batch with the context that must enclose its forward and its backward."""
        last = len(self.micro_batches) - 1
        return ((batch, self.gradient_sync(index == last)) for index, batch in enumerate(self.micro_batches))

    def temperature(self, batch: PackedBatch) -> Temperature:
        """Return what divides the logits of a micro-batch: a number, or [T], one for each token."""
        return temperature_of(batch, self._temperature)

    def loss(self, output: TokenOutput, batch: PackedBatch) -> torch.Tensor:
        """Compute a micro-batch's loss, with gradient and not scaled, and add it and its metrics to the totals."""
        loss, metrics = self._loss_fn(output, batch)
        self.totals.add(loss, metrics, has_loss_tokens=batch.loss_positions.numel() > 0)
        return loss
