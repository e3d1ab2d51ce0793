"""Driving the engine on one rank, and looking at the gradient it is about to apply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from plugins.verl_fsdp.tests.reference import weighted_loss
from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.train_step import StepReport, train_step
from verl_engine.host.backend_host import BackendHost
from verl_fsdp.config import Fsdp2Config

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from verl_engine.batch.sequence import Sequence
    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.base import Engine, LossFn
    from verl_fsdp.engine import Fsdp2Engine

Split = list[list[list[int]]]
"""``split[rank][micro_batch]``: indices of sequences."""


@dataclass
class Driver:
    """An fsdp2 engine with its host, in a process that has a process group."""

    host: BackendHost
    engine: Fsdp2Engine

    @classmethod
    def create(cls, folder: Path, **settings: Any) -> Driver:
        """Build the engine from a model folder."""
        config = Fsdp2Config.model_validate({"learning_rate": 1e-3, "device": "cpu", **settings})
        host = BackendHost.load("fsdp2")
        return cls(host, cast("Fsdp2Engine", host.create(config, folder, "actor")))

    def step(self, micro_batches: list[list[Sequence]], loss_fn: LossFn = weighted_loss) -> StepReport:
        """Make one optimizer step over this rank's micro-batches."""
        return train_step(
            self.host, self.engine, [PackedBatch.from_sequences(sequences) for sequences in micro_batches], loss_fn
        )

    def gradient(self, micro_batches: list[list[Sequence]], loss_fn: LossFn = weighted_loss) -> dict[str, torch.Tensor]:
        """Return the whole gradient that the optimizer would have got, and throw it away."""
        found: dict[str, torch.Tensor] = {}

        def look(engine: Engine) -> OptimizerStep:
            found.update(whole_gradients(self.engine))
            engine.zero_grad()
            from verl_engine.contract.optimizer_step import OptimizerStep

            return OptimizerStep(grad_norm=0.0, applied=False, learning_rate=0.0)

        original = self.host.optimizer_step
        self.host.optimizer_step = look  # type: ignore[method-assign]
        try:
            self.step(micro_batches, loss_fn)
        finally:
            self.host.optimizer_step = original  # type: ignore[method-assign]
        return found

    def weights(self) -> dict[str, torch.Tensor]:
        """Return copies of all whole weights."""
        names = [spec.name for spec in self.engine.weight_specs()]
        return {name: tensor.clone() for name, tensor in self.engine.full_weights(names)}


def whole_gradients(engine: Fsdp2Engine) -> dict[str, torch.Tensor]:
    """Gather every gradient."""
    result = {}
    for name, parameter in engine.parameters.items():
        assert parameter.grad is not None, name
        result[name] = cast("Any", parameter.grad).full_tensor().clone()
    return result


def take(sequences: list[Sequence], rank_split: list[list[int]]) -> list[list[Sequence]]:
    """Look up the sequences of one rank's micro-batches."""
    return [[sequences[index] for index in group] for group in rank_split]
