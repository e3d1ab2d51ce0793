"""What turns gradients into other weights: Megatron's buffers and optimizer, and the schedule of learning rates."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.device import Device
from verl_engine.engine.loss_scaler import LossScaler
from verl_engine.engine.lr_schedule import lr_multiplier
from verl_megatron_mindspeed.config import MegatronConfig
from verl_megatron_mindspeed.model.build import MegatronModel
from verl_megatron_mindspeed.parallel import Parallel
from verl_megatron_mindspeed.update.gradient_norm import GradientNorm
from verl_megatron_mindspeed.update.gradients import Gradients
from verl_megatron_mindspeed.update.optimizer import build_optimizer, inner_optimizers, set_weight_decay, wrap_chunks
from verl_megatron_mindspeed.update.slices import Slice, find_slices
from verl_megatron_mindspeed.weights.pieces import Held
from verl_megatron_mindspeed.weights.places import find_places


class Training:
    """One engine's gradients, optimizer and schedule."""

    def __init__(self, config: MegatronConfig, model: MegatronModel, parallel: Parallel, device: Device) -> None:
        """Wrap the model's chunks, in place, and build the optimizer; the weights are loaded already.

        Collectives: an all-gather of small objects.
        """
        self.config = config
        self.num_steps = 0
        """Optimizer steps that were applied: where the schedule of learning rates is."""
        self.num_updates = 0
        """As Adam counts them, for its bias correction."""
        self.loss_scaler = LossScaler() if config.param_dtype == "float16" else None
        wrap_chunks(config, model)
        self.chunks: list[Any] = list(model.chunks)
        self._dispatchers = [
            module.token_dispatcher
            for chunk in self.chunks
            for module in chunk.modules()
            if hasattr(module, "token_dispatcher")
        ]
        self.gradients = Gradients(self.chunks, device)
        self._optimizer = build_optimizer(config, self.chunks)
        names = {
            parameter: f"{index}.{name}"
            for index, chunk in enumerate(self.chunks)
            for name, parameter in chunk.named_parameters()
        }
        self.slices = find_slices(self._optimizer.chained_optimizers, names)
        set_weight_decay(self.slices, config)
        self._slice_of = {each.parameter: each for each in self.slices}
        places = find_places(model, parallel)
        self._norm = GradientNorm(self.slices, places, device.torch_device, is_distributed=config.distributed_optimizer)
        self._is_gather_due = False
        model.transformer.grad_scale_func = self.scale_loss

    @property
    def scheduled_rate(self) -> float:
        """The learning rate where the schedule is."""
        return self.config.learning_rate * lr_multiplier(self.config, self.num_steps)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Multiply a loss by float16's loss scale; Megatron calls it before the backward."""
        return loss if self.loss_scaler is None else loss * self.loss_scaler.scale

    @torch.no_grad()
    def step(self, learning_rate: float | None = None) -> OptimizerStep:
        """Clip and step, or skip on all ranks alike when the norm is not finite; then forget the gradients.

        A given rate is used as it is. Collectives: an all-reduce of the norm over all ranks, with ``count_zeros``
        another, and with the distributed optimizer all-gathers of the weights, unless they overlap with the next
        forward.
        """
        rate = self.scheduled_rate if learning_rate is None else learning_rate
        self._optimizer.prepare_grads()  # from the buffers to where torch's optimizer looks for them
        scale = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        norm = self._norm.norm() / scale
        num_zeros = self._norm.num_zeros() if self.config.count_zeros else None
        applied = math.isfinite(norm)
        if applied:
            self._apply(rate, min(1.0, self.config.max_grad_norm / (norm + 1e-6)) / scale)
        self.zero_grad()
        is_scale_lower = self.loss_scaler is not None and self.loss_scaler.update(is_finite=applied)
        return OptimizerStep(norm, applied, rate, overflow=is_scale_lower, num_zeros=num_zeros)

    def _apply(self, rate: float, factor: float) -> None:
        gradients = self._norm.gradients()
        if gradients and factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        for inner in inner_optimizers(self.slices):
            for group in inner.param_groups:
                group["lr"] = rate
        self._optimizer.step_with_ready_grads()
        self._is_gather_due = self.config.overlap_param_gather
        self.num_steps += 1
        self.num_updates += 1

    def zero_grad(self) -> None:
        """Forget all gradients, and a pass that did not end."""
        self.gradients.clear()
        for each in self.slices:
            each.held.grad = None
        for dispatcher in self._dispatchers:
            _forget_graph(dispatcher)

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Make the weights those of the last step on every rank, where they are gathered in the next forward only.

        Collectives: with ``overlap_param_gather``, the first time after a step, all-gathers over data-parallel ranks.
        """
        if not self._is_gather_due:
            return
        for chunk in self.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)
        self._is_gather_due = False

    @property
    def has_masters(self) -> bool:
        """Whether the float32 values are tensors of their own; the same on every rank."""
        return self.config.param_dtype != "float32"

    def masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's live float32 masters, flat; none where the parameters are float32 themselves."""
        return ((f"{each.name}.master", each.master) for each in self.slices if each.has_master)

    @torch.no_grad()
    def take_masters_from_model(self) -> None:
        """Let the masters follow parameters that were loaded. No collectives."""
        for each in self.slices:
            if each.has_master:
                each.master.copy_(each.model_value)

    @torch.no_grad()
    def bring_masters_to_model(self) -> None:
        """Let the parameters follow masters, or parts of parameters, that were loaded.

        Collectives: with the distributed optimizer, all-gathers over the data-parallel ranks.
        """
        for each in self.slices:
            if each.has_master:
                each.model_value.copy_(each.master)
        if self.config.distributed_optimizer:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)

    def held_master(self, parameter: torch.Tensor) -> Held:
        """Return what this rank's optimizer has of a parameter: its float32 value."""
        each = self._find(parameter)
        return None if each is None else each.as_held(each.master)

    def held_moment(self, name: str, parameter: torch.Tensor) -> Held:
        """Return Adam's moment for it: ``exp_avg`` or ``exp_avg_sq``; after `fill_state`."""
        each = self._find(parameter)
        return None if each is None else each.as_held(each.inner.state[each.held][name].view(-1))

    def _find(self, parameter: torch.Tensor) -> Slice | None:
        assert isinstance(parameter, torch.nn.Parameter)
        return self._slice_of.get(parameter)


def _forget_graph(dispatcher: object) -> None:
    """Let go of the graph of a pass, of which a mixture of experts keeps results.

    The graph holds the gradients' hooks, they hold the model, and the model holds those results. Python's collector
    cannot see through the graph, so an engine that is gone would leave its weights and process groups in memory.
    """
    for name, value in vars(dispatcher).items():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            setattr(dispatcher, name, value.detach())
