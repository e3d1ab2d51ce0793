"""What engines share whose model is one torch module on each rank: weights, AdamW, snapshots, checkpoints."""

import inspect
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import UnsupportedError
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.base import DataParallel, Engine, WeightShard, WeightSpec
from verl_engine.engine.device import Device
from verl_engine.engine.loss_scaler import LossScaler
from verl_engine.engine.lr_schedule import lr_multiplier
from verl_engine.engine.offload import PARTS, GradientSlot, Offload
from verl_engine.engine.optimizer import adamw
from verl_engine.engine.train_mode import set_train_mode
from verl_engine.engine.weights.engine_weights import EngineWeights
from verl_engine.engine.weights.held_dtypes import held_dtypes
from verl_engine.engine.weights.model_folder import ModelFolderWriter
from verl_engine.engine.weights.module_weights import Exported, local_tensors, weight_specs


class ModuleEngine(Engine):
    """One torch module whose parameters have Hugging Face names, plain or sharded as DTensors.

    A subclass loads the model, hands it to this constructor, and adds `forward` and `clip_gradients`.
    """

    _optimizer: torch.optim.Optimizer | None = None
    _offload: Offload | None = None
    loss_scaler: LossScaler | None = None
    """Set by engines that compute in float16: the loss, and so the gradient until `clip_gradients`, is multiplied by
    its scale."""

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        module: torch.nn.Module,
        data_parallel: DataParallel | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        weights: EngineWeights | None = None,
    ) -> None:
        """Take a model, move it to the device, and build its optimizer. No collectives.

        Args:
            config: the ``engine`` section.
            device: of this rank.
            module: transformers' model, sharded already if it is to be.
            data_parallel: this rank's index; by default that of the only rank. Gradients are taken to be averaged over
                the ranks; where they are summed, set ``gradient_divisor = 1`` afterwards.
            optimizer: of the module's parameters; by default AdamW as configured. A forward-only engine has none.
            weights: an `EngineWeights` of a module that sharding has put in its place; then it is not moved.
        """
        self.config = config
        self.device = device
        self.data_parallel = data_parallel or DataParallel(rank=0, size=1, group=None)
        self.gradient_divisor = self.data_parallel.size
        self.module = module
        embeddings = getattr(module, "get_input_embeddings", lambda: None)()
        self.vocab_size = getattr(embeddings, "num_embeddings", None)
        self.weights = weights or EngineWeights(module.to(device.torch_device))
        self.parameters = self.weights.parameters
        self._folder_writer = ModelFolderWriter(module)
        self._held_dtypes: dict[torch.dtype, Mapping[str, torch.dtype]] = {}
        if config.forward_only:
            module.requires_grad_(False)
            return
        self._optimizer = optimizer or adamw(self.parameters, config, device)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: lr_multiplier(config, step))
        # Steps made by hand too: a version counter does not see those on DTensors.
        self._optimizer.register_step_post_hook(lambda *_: self.note_weights_changed())
        self._configured = _configured_settings(self._optimizer)

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

        With a `loss_scaler` the gradient found is ``loss_scaler.scale`` times too large, and is brought back too; the
        norm returned is without that factor. What is not finite may be left in any state: it is dropped.
        Collectives: whatever a norm over all ranks takes.
        """

    def optimizer_step(self, learning_rate: float | None = None) -> OptimizerStep:
        """Clip and step, or skip when the norm is not finite; see ``engine_optimizer_step``.

        A given rate replaces the config's in each parameter group; factors of groups stay.
        """
        if learning_rate is None:
            learning_rate = self.config.learning_rate * lr_multiplier(self.config, self.schedule.last_epoch)
        norm = float(self.clip_gradients())
        applied = math.isfinite(norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate * (group["initial_lr"] / self.config.learning_rate)
            self.optimizer.step()
            self.schedule.step()
        self.drop_gradients()
        is_scale_lower = self.loss_scaler is not None and self.loss_scaler.update(is_finite=applied)
        return OptimizerStep(norm, applied, learning_rate, overflow=is_scale_lower)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the backward, times the scale of the `loss_scaler` where there is one; see the base class."""
        super().backward(loss if self.loss_scaler is None else loss * self.loss_scaler.scale)

    def drop_gradients(self) -> None:
        """Forget the gradients after a step."""
        if self._offload is not None:
            self._offload.forget_gradients()
        for parameter in self.parameters.values():
            parameter.grad = None

    def zero_grad(self) -> None:
        """Forget all gradients; see the base class."""
        self.drop_gradients()

    def set_training(self, training: bool) -> None:
        """Switch between train and eval mode."""
        set_train_mode(self.weights.module, training=training, dropout=self.config.dropout == "model")

    def _settle(self) -> None:
        """Free what a forward left gathered, or it would be used for the weights that are read, set or moved now."""

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what a snapshot holds; see the base class."""
        self._settle()
        changing = (
            (name, parameter)
            for name, parameter in self.parameters.items()
            if parameter.requires_grad or self.config.forward_only
        )
        return local_tensors((*changing, *self.weights.named_buffers()))

    def exported(self) -> dict[str, Exported]:
        """Say what each exported weight is made of, by name; overridden where names differ or adapters add to it."""
        return self.weights.exported()

    def weight_specs(self) -> list[WeightSpec]:
        """List the exported weights."""
        return weight_specs(self.exported())

    def held_dtypes(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """Say what transformers does not cast to a dtype; see the base class."""
        if dtype not in self._held_dtypes:
            self._held_dtypes[dtype] = held_dtypes(self.module, dtype)
        return self._held_dtypes[dtype]

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full weights; see the base class."""
        return self.weights.full(self.exported(), names)

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take full weights; see the base class. No collectives.

        Raises:
            UnsupportedError: there are adapters: what comes is merged, and cannot be taken apart.
        """
        self._settle()
        try:
            self.weights.load_full(self.exported(), weights)
        finally:
            self.note_weights_changed()  # those before a misfit are in

    def weight_shards(self) -> Iterator[WeightShard]:
        """Yield this rank's shards; see the base class.

        Collectives: none; with adapters, two all-gathers each, of their small matrices.
        """
        return self.weights.shards(self.exported())

    def load_weight_shards(self, shards: Iterable[WeightShard]) -> None:
        """Take this rank's shards; see the base class, and `load_full_weights`."""
        self._settle()
        try:
            self.weights.load_shards(self.exported(), shards)
        finally:
            self.note_weights_changed()

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder; see the base class. The first rank holds a copy of all weights meanwhile."""
        weights = self.full_weights([spec.name for spec in self.weight_specs()])
        self._folder_writer.write(self.module, weights, folder)

    def move(self, *, to_cpu: bool, parameters: bool = True, gradients: bool = True, optimizer: bool = True) -> None:
        """Move parts to the CPU or back; see the base class, and `Offload`.

        What is there already is left alone. Until a part is back, what needs it raises UnsupportedError. Collectives:
        none.
        """
        self._settle()
        if self._offload is None:
            self._offload = Offload(self.weights, self._optimizer, self.device)
        asked = zip(PARTS, (parameters, gradients, optimizer), strict=True)
        self._offload.move([part for part, is_asked in asked if is_asked], self.gradient_slots(), to_cpu=to_cpu)

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield every place where gradients are kept; overridden where there are more than the parameters' own."""
        return (GradientSlot(parameter) for parameter in self.parameters.values())

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from; see the base class."""
        self._settle()
        others = {name: other.state_dict() for name, other in self._stateful()}
        return self.weights.state(self._optimizer) | others

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state; see the base class."""
        self._settle()
        self.weights.load_state(self._optimizer, state)
        for name, other in self._stateful():
            if name in state:
                other.load_state_dict(state[name])
        self.note_weights_changed()
        self.apply_configured_settings()

    def apply_configured_settings(self) -> None:
        """Go on with the config's rate, weight decay and so on, where a loaded checkpoint has those of its own config.

        Else a lower ``engine.learning_rate`` after a resume would be reported, and not used. What else an optimizer
        keeps in its groups, such as counts, is the checkpoint's.
        """
        if self._optimizer is None:
            return
        for group, settings in zip(self._optimizer.param_groups, self._configured, strict=True):
            group.update(settings)
            group["lr"] = group["initial_lr"] * lr_multiplier(self.config, self.schedule.last_epoch)
        self.schedule.base_lrs = [group["initial_lr"] for group in self._optimizer.param_groups]

    def _stateful(self) -> list[tuple[str, Any]]:
        names = ("schedule", "loss_scaler")
        return [(name, getattr(self, name)) for name in names if getattr(self, name, None) is not None]


def _configured_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Take from each parameter group what the optimizer was made with: arguments of its class, or of one it is."""
    inits = (inspect.signature(vars(kind)["__init__"]) for kind in type(optimizer).__mro__ if "__init__" in vars(kind))
    arguments = {name for init in inits for name in init.parameters} - {"self", "params", "lr"} | {"initial_lr"}
    return [{key: value for key, value in group.items() if key in arguments} for group in optimizer.param_groups]
