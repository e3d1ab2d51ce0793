"""The fsdp2 engine: a Hugging Face causal LM under PyTorch ``fully_shard``.

Shape legend: T tokens of a micro-batch, M loss tokens, N sequences, L the longest of them, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from verl_engine.engine.base import DataParallel, TokenOutput
from verl_engine.engine.device import Device
from verl_engine.engine.module_engine import ModuleEngine
from verl_engine.engine.token_log_probs import token_log_probs
from verl_fsdp.gradients import clip_gradients, forget_gradients, grad_norm, recover_from_abandoned_pass
from verl_fsdp.parallelize import load_model, shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_fsdp.config import Fsdp2Config


class Fsdp2Engine(ModuleEngine):
    """One rank's shard of the model with its part of AdamW's state."""

    config: Fsdp2Config

    def __init__(self, config: Fsdp2Config, model_folder: Path) -> None:
        """Load the model, shard it over all ranks, build the optimizer. Collectives: those of a new device mesh."""
        device = Device.resolve(config.device, dist.get_rank())
        mesh = init_device_mesh(device.kind, (dist.get_world_size(),), mesh_dim_names=("dp",))
        module = load_model(config, model_folder)
        self.model = shard(module, config, mesh)
        super().__init__(config, device, module, DataParallel(mesh.get_local_rank(), mesh.size(), mesh.get_group()))

    def forward(self, batch: PackedBatch, temperature: float) -> TokenOutput:
        """Run the model on a micro-batch, packed or padded as configured; see the base class."""
        logits_MV = self._packed_logits(batch) if self.config.packing else self._padded_logits(batch)
        if not torch.is_grad_enabled():
            self.model.reshard()  # without a backward nothing else would free the root's gathered parameters
        return TokenOutput(token_log_probs(logits_MV, batch, temperature))

    def zero_grad(self) -> None:
        """Forget all gradients; see the base class."""
        recover_from_abandoned_pass(self.model)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients, those held back for a later reduction too."""
        forget_gradients(self.model, self.parameters.values())

    def clip_gradients(self) -> torch.Tensor:
        """Clip by the norm over all ranks; see the base class."""
        norm = grad_norm(self.parameters.values(), self.data_parallel.group)
        clip_gradients(self.parameters.values(), norm, self.config.max_grad_norm)
        return norm

    def local_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's live shards of what is trained, and all buffers."""
        self.model.reshard()
        return super().local_weights()

    def move(self, *, to_cpu: bool) -> None:
        """Move parameters and optimizer state; see the base class."""
        self.model.reshard()
        super().move(to_cpu=to_cpu)

    def state_dict(self) -> dict[str, Any]:
        """Return all that training goes on from; see the base class."""
        self.model.reshard()
        return super().state_dict()

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
        return self.module(**inputs)
