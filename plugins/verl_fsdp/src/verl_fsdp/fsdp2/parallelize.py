"""fully_shard on a model, top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from verl_fsdp.blocks import blocks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from verl_fsdp.config import Fsdp2Config


def shard(model: PreTrainedModel, config: Fsdp2Config, mesh: DeviceMesh) -> FSDPModule:
    """Apply fully_shard to each block, then to what is left. Collectives: none.

    Parameters are gathered in ``param_dtype`` and reduced in float32; what each rank keeps of them is float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32)
    for block in blocks(model, config):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
