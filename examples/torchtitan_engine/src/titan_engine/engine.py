"""The engine ``titan_engine``: Qwen3 of torchtitan, sharded over all ranks."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence
from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
from torchtitan.distributed.utils import clip_grad_norm_

from titan_engine.config import TitanConfig
from titan_engine.model import build_model, hugging_face_names, read_weights
from verl_engine import (
    BatchError,
    DataParallel,
    Device,
    FullyShardedPasses,
    GradientSlot,
    ModelFiles,
    ModuleEngine,
    PackedBatch,
    RenamedWeights,
    Temperature,
    TokenOutput,
    output_from_logits,
    write_model_folder,
)


class TitanEngine(ModuleEngine):
    """One rank's shard of the model, with its shard of the optimizer's state."""

    config: TitanConfig

    def __init__(self, config: TitanConfig, model_folder: Path) -> None:
        """Build the model, shard it, and load its weights."""
        ranks = DataParallel(rank=dist.get_rank(), size=dist.get_world_size(), group=dist.group.WORLD)
        device = Device.resolve(config.device, ranks.rank)
        self.files = ModelFiles.read(model_folder)
        model = build_model(self.files.config(), model_folder)
        apply_fsdp_to_decoder(
            model,
            init_device_mesh(device.kind, (ranks.size,), mesh_dim_names=("fsdp",)),
            param_dtype=getattr(torch, config.param_dtype),
            reduce_dtype=torch.float32,
            pp_enabled=False,
        )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no multiply-and-sum, torch's choice
        model.to_empty(device=device.torch_device)
        model.init_states(buffer_device=device.torch_device)
        self.passes = FullyShardedPasses(model)
        super().__init__(config, device, model, ranks, weights=RenamedWeights(model, hugging_face_names(model)))
        self.gradient_divisor = 1  # torchtitan switches off the division by the ranks
        self.load_full_weights(read_weights(model_folder, device.torch_device))

    def forward(self, batch: PackedBatch, temperature: Temperature) -> TokenOutput:
        """Run the sequences as rows of one call, padded behind: causal attention does not see that."""
        if batch.position_ids.dim() > 1:
            raise BatchError("titan_engine takes positions of one axis, [L] for each sequence")
        lengths = list(batch.lengths)
        tokens, positions = (
            pad_sequence(values.split(lengths), batch_first=True) for values in (batch.input_ids, batch.position_ids)
        )
        try:
            logits = self.module(tokens, positions)
        except BaseException:
            self.passes.recover()
            raise
        if not torch.is_grad_enabled():
            self.passes.reshard()
        packed = torch.cat([row[:length] for row, length in zip(logits, lengths, strict=True)])
        return output_from_logits(packed[batch.loss_positions - 1], batch, temperature, self.config.entropy)

    def gradient_sync(self, is_last_micro_batch: bool) -> AbstractContextManager[None]:
        """Reduce gradients in the backward inside, or keep each rank's own."""
        reduce = is_last_micro_batch or self.config.gradient_sync == "every_micro_batch"
        return self.passes.gradient_sync(reduce=reduce, is_last=is_last_micro_batch)

    def clip_gradients(self) -> torch.Tensor:
        """Clip in place, and return the norm before, over all ranks."""
        norm: torch.Tensor = clip_grad_norm_(self.parameters.values(), self.config.max_grad_norm)
        return norm

    def zero_grad(self) -> None:
        """Forget all gradients, and whatever an exception interrupted."""
        self.passes.recover()
        super().zero_grad()

    def drop_gradients(self) -> None:
        """Forget all gradients, the unreduced ones too."""
        self.passes.forget_gradients()

    def gradient_slots(self) -> Iterator[GradientSlot]:
        """Yield where gradients are kept, the unreduced ones too."""
        return self.passes.gradient_slots()

    def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder; see the base class."""
        write_model_folder(self.full_weights([spec.name for spec in self.weight_specs()]), self.files, folder)
