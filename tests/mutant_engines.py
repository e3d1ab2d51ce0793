"""The engines of the mutants: fsdp2's, with one thing wrong each."""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp2_engine import Fsdp2Engine
from verl_fsdp.model.loading import load_model
from verl_fsdp.update.grad_norm import clip_gradients, grad_norm

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.temperature import Temperature
    from verl_engine.engine.token_output import TokenOutput
    from verl_fsdp.config import Fsdp2Config

__all__ = ["Fsdp2Engine"]


class WrongScale(Fsdp2Engine):
    """Forgets that fully_shard averages over the ranks."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        engine.gradient_divisor = 1
        return engine


class Bf16Accumulation(Fsdp2Engine):
    """Reduces, and so accumulates, in bfloat16."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        dtype = getattr(torch, config.param_dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        with mock.patch("verl_fsdp.fsdp2.parallelize.MixedPrecisionPolicy", return_value=policy):
            return super().made(config, model_folder)


class Fp16WithoutLossScale(Fsdp2Engine):
    """Computes in float16 as it would in bfloat16."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        engine.loss_scaler = None
        return engine


class LossScaleKept(Fsdp2Engine):
    """Never lowers the loss scale, whatever overflows."""

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        step = super().optimizer_step(learning_rate)
        if self.loss_scaler is not None:
            self.loss_scaler.scale = 65536.0
        return step


class LossScaleLeftIn(Fsdp2Engine):
    """Clips and steps by the gradient of the scaled loss."""

    def clip_gradients(self) -> torch.Tensor:
        norm = grad_norm(self.parameters.values(), None)
        return clip_gradients(self.parameters.values(), norm, self.config.max_grad_norm)


class PassNotReset(Fsdp2Engine):
    """After an exception forgets the gradients, but leaves fully_shard in the middle of a pass."""

    def zero_grad(self) -> None:
        self.drop_gradients()


class HeldGradientsKept(Fsdp2Engine):
    """Sees the reduced gradients only, as ``zero_grad`` of an optimizer does."""

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


class ClipAfterStep(Fsdp2Engine):
    """Clips gradients that were applied already."""

    def clip_gradients(self) -> torch.Tensor:
        return grad_norm(self.parameters.values(), self.data_parallel.group)

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        step = super().optimizer_step(learning_rate)
        super().clip_gradients()
        return step


class LocalNorm(Fsdp2Engine):
    """Clips each rank's shards by their own norm."""

    def clip_gradients(self) -> torch.Tensor:
        shards = [parameter.grad.to_local() for parameter in self.parameters.values()]  # type: ignore[union-attr]
        norm = torch.stack([shard.square().sum() for shard in shards]).sum().sqrt()
        clip_gradients(self.parameters.values(), norm, self.config.max_grad_norm)
        return norm


class SkipOnOneRank(Fsdp2Engine):
    """Rank 0 does not see that the gradient is not finite."""

    def clip_gradients(self) -> torch.Tensor:
        norm = super().clip_gradients()
        return norm.nan_to_num(1.0, 1.0) if self.data_parallel.rank == 0 else norm


class DecayedNorms(Fsdp2Engine):
    """Weight decay on norms and biases too."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        for group in engine.optimizer.param_groups:
            group["weight_decay"] = config.weight_decay
        return engine


class VectorsNeverDecayed(Fsdp2Engine):
    """Leaves norms and biases without weight decay, whatever the config says."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        return super().made(config.model_copy(update={"decay_vectors": False}), model_folder)


class CheckpointWithoutOptimizer(Fsdp2Engine):
    """Resumes with AdamW's moments at zero."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {"model": state["model"], "schedule": state["schedule"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.schedule.load_state_dict(state["schedule"])


class CheckpointWithoutBuffers(Fsdp2Engine):
    """Saves what a model folder holds, and loses what else changes in training."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffers": {}}


class CheckpointOfFirstSave(Fsdp2Engine):
    """Copies its weights for the first checkpoint, and saves that copy each time."""

    _copied: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._copied is None:
            self._copied = {name: tensor.detach().clone() for name, tensor in state["model"].items()}
        return {**state, "model": self._copied}


class CheckpointReadsLate(Fsdp2Engine):
    """Reads its learning rate when the checkpoint is written, not when it is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "schedule": {"counter": LateReader(self.schedule)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "schedule": state["schedule"]["counter"]})


class LateReader:
    """Is pickled as the state that a schedule has at that time."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def __deepcopy__(self, memo: dict[int, Any]) -> LateReader:
        return self

    def __reduce__(self) -> tuple[type[dict[str, Any]], tuple[dict[str, Any]]]:
        return dict, (self._schedule.state_dict(),)


class SeedsAtFirstStep(Fsdp2Engine):
    """Seeds when it first trains, which a resumed run does once more."""

    _is_seeded = False

    def set_training(self, training: bool) -> None:
        super().set_training(training)
        if training and not self._is_seeded:
            self._is_seeded = True
            torch.manual_seed(self.config.seed + self.data_parallel.rank)


class OffloadLosesOptimizer(Fsdp2Engine):
    """Frees AdamW's moments instead of moving them."""

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)
        self.optimizer.state.clear()


class OffloadLosesGradients(Fsdp2Engine):
    """Frees the gradients instead of moving them."""

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        if gradients:
            self.drop_gradients()
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)


class OffloadRestartsOptimizer(Fsdp2Engine):
    """Forgets AdamW's moments where the parameters are moved without them."""

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)
        if parameters and not optimizer:
            self.optimizer.state.clear()


class SavesOnlyWhatIsThere(Fsdp2Engine):
    """Checkpoints lack AdamW's moments while they are on the CPU."""

    _is_away = False

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)
        self._is_away = to_cpu

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._is_away:
            state["optimizer"]["state"] = {
                parameter: {name: torch.zeros_like(value) for name, value in moments.items()}
                for parameter, moments in state["optimizer"]["state"].items()
            }
        return state


class LeftInTrainMode(Fsdp2Engine):
    """Never leaves train mode."""

    def set_training(self, training: bool) -> None:
        del training
        super().set_training(True)


class DropoutIgnored(Fsdp2Engine):
    """Draws the model's dropout in train mode, whatever the config says."""

    def set_training(self, training: bool) -> None:
        self.module.train(training)


class LeftInEvalMode(Fsdp2Engine):
    """Stays in eval mode after the first inference."""

    def set_training(self, training: bool) -> None:
        if not training:
            super().set_training(False)


class RandomSeed(Fsdp2Engine):
    """Draws its own seed."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        torch.seed()
        return engine


class ValueOfTheTokenItself(Fsdp2Engine):
    """Takes values from the state after the token."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        numbers = engine.model_forward.head.numbers

        def late(model: Any, run: Any, *arguments: Any) -> torch.Tensor:
            values: torch.Tensor = numbers(model, dataclasses.replace(run, columns=run.columns + 1), *arguments)
            return values

        engine.model_forward.head.numbers = late
        return engine


class HeadDropout(Fsdp2Engine):
    """Leaves the dropout before the last layer as transformers has it."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        for module in engine.module.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.1
        return engine


class CriticFromScratch(Fsdp2Engine):
    """Takes of a language model's folder the config only."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        def forget(config: Fsdp2Config, model_folder: Path) -> Any:
            model = load_model(config, model_folder)
            is_read = not any(parameter.is_meta for parameter in model.parameters())
            return type(model)(model.config) if config.head == "value" and is_read else model

        with mock.patch("verl_fsdp.fsdp2.build.load_model", side_effect=forget):
            return super().made(config, model_folder)


class CriticSavedWithoutHead(Fsdp2Engine):
    """Writes the layers only, so that whoever loads the folder draws a head of its own."""

    def save_pretrained(self, folder: Path) -> None:
        trunk = [spec for spec in self.weight_specs() if not spec.name.startswith("score.")]
        with mock.patch.object(self, "weight_specs", return_value=trunk):
            super().save_pretrained(folder)


class ScheduleNotResumed(Fsdp2Engine):
    """Resumes with a learning rate that begins again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "schedule": self.schedule.state_dict()})


class NewestEngineRuns(Fsdp2Engine):
    """Has one model of a kind in a process: that of the newest engine."""

    newest: ClassVar[dict[str, Fsdp2Engine]] = {}

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        cls.newest[config.head] = super().made(config, model_folder)
        return cls.newest[config.head]

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        return Fsdp2Engine.forward(self.newest[self.config.head], batch, temperature)


class EndsTheGroup(Fsdp2Engine):
    """Ends the process group when it is no longer used."""

    @classmethod
    def made(cls, config: Fsdp2Config, model_folder: Path) -> Any:
        engine = super().made(config, model_folder)
        weakref.finalize(engine, dist.destroy_process_group)
        return engine
