"""The engines of the mutants: fsdp2's, with one thing wrong each."""

from __future__ import annotations

import dataclasses
import shutil
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from verl_engine.engine.base import Engine, TokenOutput, WeightSpec
from verl_fsdp.fsdp2.engine import Fsdp2Engine
from verl_fsdp.grad_norm import clip_gradients, grad_norm
from verl_fsdp.model import load_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.base import LossFn
    from verl_fsdp.config import Fsdp2Config

__all__ = ["Fsdp2Engine"]


class WrongScale(Fsdp2Engine):
    """Forgets that fully_shard averages over the ranks."""

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        self.gradient_divisor = 1


class Bf16Accumulation(Fsdp2Engine):
    """Reduces, and so accumulates, in bfloat16."""

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        dtype = getattr(torch, config.param_dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        with mock.patch("verl_fsdp.fsdp2.parallelize.MixedPrecisionPolicy", return_value=policy):
            super().__init__(config, model_folder)


class HookNotEntered(Fsdp2Engine):
    """Brings a schedule of its own, and forgets the hook in it."""

    def forward_backward(
        self,
        micro_batches: Sequence[PackedBatch],
        loss_fn: LossFn,
        loss_scale: float,
        temperature: float,
        gradient_sync: Callable[[bool], AbstractContextManager[None]],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        del gradient_sync
        return super().forward_backward(micro_batches, loss_fn, loss_scale, temperature, lambda _: nullcontext())


class HeldGradientsKept(Fsdp2Engine):
    """Sees the reduced gradients only, as ``zero_grad`` of an optimizer does."""

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None


class ClipAfterStep(Fsdp2Engine):
    """Clips gradients that were applied already."""

    def clip_gradients(self) -> torch.Tensor:
        return grad_norm(self.parameters.values(), self.data_parallel.group)

    def optimizer_step(self) -> OptimizerStep:
        step = super().optimizer_step()
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

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        for group in self.optimizer.param_groups:
            group["weight_decay"] = config.weight_decay


class CheckpointWithoutOptimizer(Fsdp2Engine):
    """Resumes with AdamW's moments at zero."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {"model": state["model"], "schedule": state["schedule"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["model"])
        self.schedule.load_state_dict(state["schedule"])


class OffloadLosesOptimizer(Fsdp2Engine):
    """Frees AdamW's moments instead of moving them."""

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        super().move(to_cpu=to_cpu, parameters=parameters, gradients=gradients, optimizer=optimizer)
        self.optimizer.state.clear()


class LeftInTrainMode(Fsdp2Engine):
    """Never leaves train mode."""

    def set_training(self, training: bool) -> None:
        del training
        super().set_training(True)


class LeftInEvalMode(Fsdp2Engine):
    """Stays in eval mode after the first inference."""

    def set_training(self, training: bool) -> None:
        if not training:
            super().set_training(False)


class MixedSequences(Fsdp2Engine):
    """Attention does not know where sequences end."""

    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        return super().forward(dataclasses.replace(batch, lengths=(batch.num_tokens,)), temperature)


class PositionsGoOn(Fsdp2Engine):
    """Numbers the tokens of a micro-batch through, as if it were one sequence."""

    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        through = torch.arange(batch.num_tokens)
        return super().forward(dataclasses.replace(batch, position_ids=through), temperature)


class RandomSeed(Fsdp2Engine):
    """Draws its own seed."""

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        torch.seed()


class SilentRank(Fsdp2Engine):
    """Spares itself the forward of an empty micro-batch, in which the others wait for it."""

    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        if batch.loss_positions.numel() == 0:
            return TokenOutput(torch.zeros(batch.num_tokens, requires_grad=True))
        return super().forward(batch, temperature)


class WrongName(Fsdp2Engine):
    """Exports names with a wrapper's prefix."""

    def weight_specs(self) -> list[WeightSpec]:
        return [dataclasses.replace(spec, name=f"module.{spec.name}") for spec in super().weight_specs()]

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        inner = [name.removeprefix("module.") for name in names]
        return ((f"module.{name}", tensor) for name, tensor in super().full_weights(inner))


class TemperatureInInferenceOnly(Fsdp2Engine):
    """Trains at temperature 1, whatever is asked for."""

    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        return super().forward(batch, 1.0 if torch.is_grad_enabled() else temperature)


class ScheduleNotResumed(Fsdp2Engine):
    """Resumes with a learning rate that begins again."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({**state, "schedule": self.schedule.state_dict()})


class StaleExport(Fsdp2Engine):
    """Exports what it gathered first, also after a step."""

    _gathered: dict[str, torch.Tensor] | None = None

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._gathered is None:
            every = [spec.name for spec in self.weight_specs()]
            self._gathered = {name: tensor.clone() for name, tensor in super().full_weights(every)}
        return ((name, self._gathered[name]) for name in names)

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().load_full_weights(weights)
        self._gathered = None


class TieBroken(Fsdp2Engine):
    """The output layer is a copy of the embedding that nobody trains."""

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        module = load_model(config, model_folder)
        is_tied = module.lm_head.weight is module.model.embed_tokens.weight
        if is_tied:
            module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone(), requires_grad=False)
        with mock.patch("verl_fsdp.engine.load_model", return_value=module):
            super().__init__(config, model_folder)
        if is_tied:
            del self.parameters["lm_head.weight"]


class TiedTwice(Fsdp2Engine):
    """Exports the output layer, and the embedding that it is."""

    def weight_specs(self) -> list[WeightSpec]:
        specs = super().weight_specs()
        embedding = specs[0]
        return [*specs, *([dataclasses.replace(embedding, name="lm_head.weight")] if self._is_tied() else [])]

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            inner = self.weight_specs()[0].name if name == "lm_head.weight" and self._is_tied() else name
            for _, tensor in super().full_weights([inner]):
                yield name, tensor

    def _is_tied(self) -> bool:
        return "lm_head.weight" not in self.parameters


class NoImport(Fsdp2Engine):
    """Takes no weights."""

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        Engine.load_full_weights(self, weights)


class SavesWhatItLoaded(Fsdp2Engine):
    """Copies the folder that it was made from."""

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        super().__init__(config, model_folder)
        self._model_folder = model_folder

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        if self.data_parallel.rank == 0:
            shutil.copytree(self._model_folder, folder, dirs_exist_ok=True)
        torch.distributed.barrier()
