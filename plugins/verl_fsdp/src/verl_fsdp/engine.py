"""The fsdp2 engine: a Hugging Face causal LM under PyTorch ``fully_shard``.

Shape legend: T tokens of a micro-batch, M loss tokens, N sequences, L the longest of them, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.base import DataParallel, Engine, TokenOutput
from verl_engine.engine.device import Device
from verl_engine.engine.lr_schedule import lr_multiplier
from verl_fsdp.gradients import clip_gradients, forget_gradients, grad_norm, recover_from_abandoned_pass
from verl_fsdp.parallelize import load_model, shard
from verl_fsdp.weights import full_weights, load_full_weights, local_tensors, save_pretrained, weight_specs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import WeightSpec
    from verl_fsdp.config import Fsdp2Config


class Fsdp2Engine(Engine):
    """One rank's shard of the model with its part of AdamW's state."""

    config: Fsdp2Config

    def __init__(self, config: Fsdp2Config, model_folder: Path, role: str) -> None:
        """Load the model, shard it over all ranks, build the optimizer. Collectives: those of a new device mesh."""
        self.config = config
        self.role = role
        self.device = Device.resolve(config.device, dist.get_rank())
        mesh = init_device_mesh(self.device.kind, (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.data_parallel = DataParallel(mesh.get_local_rank(), mesh.size(), mesh.get_group())
        self.gradient_divisor = mesh.size()
        model = load_model(config, model_folder)
        self.model = shard(model, config, mesh)
        self._transformer = model
        # Between a forward and a backward the modules hold gathered parameters; these are the shards, always.
        self.parameters = dict(model.named_parameters())
        self.optimizer = _adamw(self.parameters, config, self.device)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: lr_multiplier(config, step))

    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        """Run the model on a micro-batch, packed or padded as configured; see the base class."""
        logits_MV = self._packed_logits(batch) if self.config.packing else self._padded_logits(batch)
        if not torch.is_grad_enabled():
            self.model.reshard()  # without a backward nothing else would free the root's gathered parameters
        targets_M = batch.input_ids[batch.loss_positions]
        logp_M = (logits_MV.float() / temperature).log_softmax(-1).gather(-1, targets_M[:, None])[:, 0]
        zeros_T = torch.zeros(batch.num_tokens, device=logp_M.device)
        return TokenOutput(zeros_T.index_put((batch.loss_positions,), logp_M))

    def zero_grad(self) -> None:
        """Forget all gradients; see the base class."""
        recover_from_abandoned_pass(self.model)
        forget_gradients(self.model, self.parameters.values())

    def set_training(self, training: bool) -> None:
        """Switch between train and eval mode."""
        self._transformer.train(training)

    def optimizer_step(self) -> OptimizerStep:
        """Clip and step, or skip when the norm is not finite; see ``engine_optimizer_step``."""
        parameters = self.parameters.values()
        norm = grad_norm(parameters, self.data_parallel.group)
        # Tested first: clipping by a norm that is not finite would spoil every gradient.
        applied = bool(norm.isfinite())
        learning_rate = float(self._schedule.get_last_lr()[0])
        if applied:
            clip_gradients(parameters, norm, self.config.max_grad_norm)
            self.optimizer.step()
            self._schedule.step()
        forget_gradients(self.model, parameters)
        return OptimizerStep(grad_norm=float(norm), applied=applied, learning_rate=learning_rate)

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's live shards of what is trained, and all buffers."""
        self.model.reshard()
        trained = ((name, parameter) for name, parameter in self.parameters.items() if parameter.requires_grad)
        return local_tensors((*trained, *self._transformer.named_buffers()))

    def load_full_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take whole weights; see the base class."""
        load_full_weights(self._transformer, self.parameters, weights)

    def move(self, *, to_cpu: bool) -> None:
        """Move parameters and optimizer state; see the base class."""
        self.model.reshard()
        target = torch.device("cpu") if to_cpu else self.device.torch_device
        torch.nn.Module.to(self._transformer, target)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, torch.Tensor) and value.ndim:  # AdamW's step counters stay where they are
                    state[name] = value.to(target)
        self.device.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from; see the base class."""
        self.model.reshard()
        fresh = not self.optimizer.state
        model, optimizer = get_state_dict(self._transformer, self.optimizer)
        if fresh:
            # torch makes the state of an optimizer that never stepped by a step without effect, but counts it.
            for state in self.optimizer.state.values():
                state["step"].zero_()
        return {"model": model, "optimizer": optimizer, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take such a state; see the base class."""
        set_state_dict(
            self._transformer,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._schedule.load_state_dict(state["schedule"])

    def weight_specs(self) -> list[WeightSpec]:
        """List the exported weights."""
        return weight_specs(self._transformer, self.parameters)

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole weights; see the base class."""
        return full_weights(self._transformer, self.parameters, names)

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder; see the base class."""
        save_pretrained(self._transformer, self.parameters, folder, is_writer=self.data_parallel.rank == 0)

    def _packed_logits(self, batch: PackedBatch) -> torch.Tensor:
        """Return [M, V]: the logits that predict each loss token."""
        # attention_mask or use_cache would make transformers mix or mask the packed sequences without a word.
        output = self._call(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            use_cache=False,
            logits_to_keep=batch.loss_positions - 1,
            packed_runs=batch.segment_runs,
        )
        return cast("torch.Tensor", output.logits[0])

    def _padded_logits(self, batch: PackedBatch) -> torch.Tensor:
        """Return [M, V], by way of rows padded on the right to the longest sequence."""
        num_rows, longest = len(batch.lengths), max(batch.lengths)
        rows = torch.repeat_interleave(
            torch.arange(num_rows), torch.tensor(batch.lengths), output_size=batch.num_tokens
        ).to(batch.input_ids.device)
        ids_NL = batch.input_ids.new_zeros(num_rows, longest).index_put((rows, batch.position_ids), batch.input_ids)
        mask_NL = torch.zeros_like(ids_NL).index_put((rows, batch.position_ids), torch.ones_like(batch.input_ids))
        output = self._call(input_ids=ids_NL, attention_mask=mask_NL, use_cache=False)
        return cast(
            "torch.Tensor",
            output.logits[rows[batch.loss_positions], batch.position_ids[batch.loss_positions] - 1],
        )

    def _call(self, **inputs: Any) -> Any:
        """Call the model; fully_shard's hooks gather and free its parameters."""
        return self._transformer(**inputs)


def _adamw(parameters: dict[str, torch.nn.Parameter], config: Fsdp2Config, device: Device) -> torch.optim.AdamW:
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
