"""What engines share whose model is one torch module on each rank: weights, AdamW, snapshots, checkpoints."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from verl_engine.contract.errors import UnsupportedError
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.base import DataParallel, Engine
from verl_engine.engine.lr_schedule import lr_multiplier
from verl_engine.engine.module_weights import (
    full_weights,
    load_full_weights,
    local_tensors,
    save_pretrained,
    weight_specs,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from verl_engine.contract.engine_config import EngineConfig
    from verl_engine.engine.base import WeightSpec
    from verl_engine.engine.device import Device


class ModuleEngine(Engine):
    """One torch module whose parameters have Hugging Face names, plain or sharded as DTensors.

    A subclass loads the model, hands it to this constructor, and adds `forward` and `clip_gradients`.
    """

    _optimizer: torch.optim.Optimizer | None = None

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        module: torch.nn.Module,
        data_parallel: DataParallel | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Take a model, move it to the device, and build its optimizer. No collectives.

        Args:
            config: the ``engine`` section.
            device: of this rank.
            module: transformers' model, sharded already if it is to be.
            data_parallel: this rank's place; by default that of the only rank. Gradients are taken to be averaged over
                the ranks; where they are summed, set ``gradient_divisor = 1`` afterwards.
            optimizer: of the module's parameters; by default AdamW as configured. A forward-only engine has none.
        """
        self.config = config
        self.device = device
        self.data_parallel = data_parallel or DataParallel(rank=0, size=1, group=None)
        self.gradient_divisor = self.data_parallel.size
        self.module = module.to(device.torch_device)
        # Between a forward and a backward a sharded module holds gathered parameters; these are the shards, always.
        self.parameters = dict(module.named_parameters())
        if config.forward_only:
            module.requires_grad_(False)
            return
        self._optimizer = optimizer or adamw(self.parameters, config, device)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: lr_multiplier(config, step))

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer.

        Raises:
            UnsupportedError: the engine is forward-only.
        """
        if self._optimizer is None:
            raise UnsupportedError("engine.forward_only=true: this engine has no optimizer and cannot train")
        return self._optimizer

    @abstractmethod
    def clip_gradients(self) -> torch.Tensor:
        """Scale the gradient down to ``max_grad_norm``, and return its L2 norm before; the same on every rank.

        What is not finite may be left in any state: it is dropped.
        Collectives: whatever a norm over all ranks takes.
        """

    def optimizer_step(self) -> OptimizerStep:
        """Clip and step, or skip when the norm is not finite; see ``engine_optimizer_step``."""
        learning_rate = float(self.schedule.get_last_lr()[0])
        norm = self.clip_gradients()
        applied = bool(norm.isfinite())
        if applied:
            self.optimizer.step()
            self.schedule.step()
        self.drop_gradients()
        return OptimizerStep(grad_norm=float(norm), applied=applied, learning_rate=learning_rate)

    def drop_gradients(self) -> None:
        """Forget the gradients after a step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def zero_grad(self) -> None:
        """Forget all gradients; see the base class."""
        self.drop_gradients()

    def set_training(self, training: bool) -> None:
        """Switch between train and eval mode."""
        self.module.train(training)

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's live shards of what is trained, and all buffers: what a snapshot holds."""
        trained = ((name, parameter) for name, parameter in self.parameters.items() if parameter.requires_grad)
        return local_tensors((*trained, *self.module.named_buffers()))

    def weight_specs(self) -> list[WeightSpec]:
        """List the exported weights."""
        return weight_specs(self.module, self.parameters)

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole weights; see the base class."""
        return full_weights(self.module, self.parameters, names)

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take whole weights; see the base class."""
        load_full_weights(self.module, self.parameters, weights)
        self.note_weights_changed()

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder; see the base class."""
        save_pretrained(self.module, self.parameters, folder, is_writer=self.data_parallel.rank == 0)

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU or back; see the base class."""
        target = torch.device("cpu") if to_cpu else self.device.torch_device
        if parameters:
            self.module.to(target)
        if gradients:
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(target)
        if optimizer and self._optimizer is not None:
            for state in self._optimizer.state.values():
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:  # AdamW's step counters stay where they are
                        state[name] = value.to(target)
        self.device.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from; see the base class."""
        fresh = not self.optimizer.state
        model, optimizer = get_state_dict(self.module, self.optimizer)
        if fresh:
            # torch makes the state of an optimizer that never stepped by a step without effect, but counts it.
            for state in self.optimizer.state.values():
                state["step"].zero_()
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state; see the base class."""
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])


def adamw(parameters: dict[str, torch.nn.Parameter], config: EngineConfig, device: Device) -> torch.optim.AdamW:
    """Build AdamW; vectors (norms and biases) are spared weight decay."""
    trained = [parameter for parameter in parameters.values() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=device.kind in ("cpu", "cuda"),
    )
