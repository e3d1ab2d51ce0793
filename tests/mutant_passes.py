"""Engines of the mutants whose passes or steps are wrong: fsdp2's, with one thing wrong each."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from tests.fsdp2_engine import Fsdp2Engine
from verl_engine.engine.base import Engine, TokenOutput
from verl_engine.engine.lr_schedule import lr_multiplier
from verl_engine.engine.routed_experts import choose

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.base import MicroBatchPass
    from verl_engine.engine.temperature import Temperature
    from verl_fsdp.config import Fsdp2Config


class HookNotEntered(Fsdp2Engine):
    """Brings a schedule of its own, and forgets the hook in it."""

    def forward_backward(self, run: MicroBatchPass) -> None:
        run.gradient_sync = lambda _: nullcontext()
        super().forward_backward(run)


class OwnNormalizer(Fsdp2Engine):
    """Brings a schedule of its own, and divides by the loss tokens whatever is asked for."""

    def forward_backward(self, run: MicroBatchPass) -> None:
        count = torch.tensor(sum(batch.loss_positions.numel() for batch in run.micro_batches))
        torch.distributed.all_reduce(count)
        run.loss_scale = self.gradient_divisor / int(count)
        super().forward_backward(run)


class SumsOnly(Fsdp2Engine):
    """Brings a schedule of its own, and knows of no metrics but sums."""

    def forward_backward(self, run: MicroBatchPass) -> None:
        super().forward_backward(run)
        sums = tuple(key for key in run.totals.keys if key[1] == "sum")
        run.totals.take(sums, run.totals.vector(sums))


class ScheduleAdvances(Fsdp2Engine):
    """The schedule counts skipped steps."""

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        step = super().optimizer_step(learning_rate)
        if not step.applied:
            self.schedule.step()
        return step


class GivenRateIgnored(Fsdp2Engine):
    """Steps at the schedule's rate, whatever is given."""

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        step = super().optimizer_step()
        return step if learning_rate is None else dataclasses.replace(step, learning_rate=learning_rate)


class GivenRateScheduled(Fsdp2Engine):
    """Takes a given rate for the peak of its schedule."""

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        if learning_rate is None:
            return super().optimizer_step()
        factor = lr_multiplier(self.config, self.schedule.last_epoch)
        return dataclasses.replace(super().optimizer_step(learning_rate * factor), learning_rate=learning_rate)


class NoGradientSync(Fsdp2Engine):
    """Says nothing of when gradients are reduced."""

    gradient_sync = Engine.gradient_sync


class MixedSequences(Fsdp2Engine):
    """Attention does not know where sequences end."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        return super().forward(dataclasses.replace(batch, lengths=(batch.num_tokens,)), temperature)


class PositionsGoOn(Fsdp2Engine):
    """Numbers the tokens of a micro-batch through, as if it were one sequence."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        through = torch.arange(batch.num_tokens)
        return super().forward(dataclasses.replace(batch, position_ids=through), temperature)


class SilentRank(Fsdp2Engine):
    """Skips the forward of an empty micro-batch, in which the others wait for it."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        if batch.loss_positions.numel() == 0:
            return TokenOutput(torch.zeros(batch.num_tokens, requires_grad=True))
        return super().forward(batch, temperature)


class TemperatureInInferenceOnly(Fsdp2Engine):
    """Trains at temperature 1, whatever is asked for."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        return super().forward(batch, 1.0 if torch.is_grad_enabled() else temperature)


class TemperatureInTrainingOnly(Fsdp2Engine):
    """Infers at temperature 1, whatever is asked for."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        return super().forward(batch, temperature if torch.is_grad_enabled() else 1.0)


class NumbersOutsideTheLoss(Fsdp2Engine):
    """Gives log-probs of all tokens."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        output = super().forward(batch, temperature)
        return dataclasses.replace(output, given_log_probs=output.log_probs - (~batch.loss_mask).float())


class MeanOfBusyRanks(Fsdp2Engine):
    """Averages over the ranks that have loss tokens."""

    def forward_backward(self, run: MicroBatchPass) -> None:
        busy = torch.tensor(float(any(batch.loss_positions.numel() for batch in run.micro_batches)))
        torch.distributed.all_reduce(busy)
        run.loss_scale *= float(busy) / self.data_parallel.size
        super().forward_backward(run)


class FailureAtTheStart(Fsdp2Engine):
    """After an exception in the first micro-batch forgets over how many ranks it averages."""

    fails_at_the_end = False
    is_first = True

    @contextmanager
    def gradient_sync(self, is_last_micro_batch: bool) -> Iterator[None]:
        try:
            with super().gradient_sync(is_last_micro_batch):
                yield
        except BaseException:
            if is_last_micro_batch if self.fails_at_the_end else self.is_first:
                self.gradient_divisor = 1
            raise
        self.is_first = is_last_micro_batch


class FailureAtTheEnd(FailureAtTheStart):
    """The same after an exception in the last micro-batch."""

    fails_at_the_end = True


class NeverGivesUp(Fsdp2Engine):
    """Takes each step that is skipped for an overflow that the next one may not have."""

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        step = super().optimizer_step(learning_rate)
        return dataclasses.replace(step, overflow=not step.applied)


class NormOfEachRank(Fsdp2Engine):
    """Reports on each rank another norm."""

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        step = super().optimizer_step(learning_rate)
        return dataclasses.replace(step, grad_norm=step.grad_norm + self.data_parallel.rank)


class CosineIsLinear(Fsdp2Engine):
    """Knows of falling schedules the straight one only."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        if config.lr_schedule == "cosine":
            config = config.model_copy(update={"lr_schedule": "linear"})
        return super().made(config, model_folder)


class GradientsKept(Fsdp2Engine):
    """Never forgets a gradient."""

    def drop_gradients(self) -> None:
        """Leave them."""


class TemperatureOfTheTokenBefore(Fsdp2Engine):
    """Divides by the temperature of the token that predicts, not of the one that is predicted."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        rolled = temperature.roll(1) if isinstance(temperature, torch.Tensor) else temperature
        return super().forward(batch, rolled)


class PositionsIgnored(Fsdp2Engine):
    """Counts positions itself, whatever the sequences bring."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        counted = torch.cat([torch.arange(length) for length in batch.lengths])
        return super().forward(dataclasses.replace(batch, position_ids=counted), temperature)


class FieldsAsFloats(Fsdp2Engine):
    """Brings a schedule of its own, and takes every field for a number of float32."""

    def forward_backward(self, run: MicroBatchPass) -> None:
        run.micro_batches = [
            dataclasses.replace(batch, fields={name: field.float() for name, field in batch.fields.items()})
            for batch in run.micro_batches
        ]
        super().forward_backward(run)


class EntropyAtTemperatureOne(Fsdp2Engine):
    """Divides the logits for log-probs only."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        output = super().forward(batch, temperature)
        if output.given_entropy is None:
            return output
        return dataclasses.replace(output, given_entropy=super().forward(batch, 1.0).entropy)


class TopKAtTemperatureOne(Fsdp2Engine):
    """Divides the logits for the tokens themselves only."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        output = super().forward(batch, temperature)
        if output.given_top_k_log_probs is None:
            return output
        return dataclasses.replace(output, given_top_k_log_probs=super().forward(batch, 1.0).top_k_log_probs)


class TopKOfAShard(Fsdp2Engine):
    """Counts the most likely ids from where a rank's half of the vocabulary begins."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        output = super().forward(batch, temperature)
        ids = output.given_top_k_ids
        return output if ids is None else dataclasses.replace(output, given_top_k_ids=ids % 16)


class EntropyWithoutGradient(Fsdp2Engine):
    """Computes the entropy, but its gradient stops there."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        output = super().forward(batch, temperature)
        return dataclasses.replace(output, given_entropy=output.given_entropy.detach())  # type: ignore[union-attr]


class ExpertsIgnored(Fsdp2Engine):
    """Lets the router choose, whatever the sequences bring."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        others = {name: field for name, field in batch.fields.items() if name != "routed_experts"}
        return super().forward(dataclasses.replace(batch, fields=others), temperature)


class ExpertsOfTheNeighbour(Fsdp2Engine):
    """Says of each token the experts of the one before it."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        output = super().forward(batch, temperature)
        found = output.given_routed_experts
        return dataclasses.replace(output, given_routed_experts=None if found is None else found.roll(1, 0))


class RouterNotTrained(Fsdp2Engine):
    """Takes the router's scores of given experts for constants."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        def constant(scores: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return choose(scores.detach(), *others)

        with patch("verl_engine.engine.routed_experts.choose", constant):
            return super().forward(batch, temperature)


class ExpertsNotChecked(Fsdp2Engine):
    """Takes an expert that is not there for the last one."""

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        fields = {
            name: field.clamp(max=3) if name == "routed_experts" else field for name, field in batch.fields.items()
        }
        return super().forward(dataclasses.replace(batch, fields=fields), temperature)
