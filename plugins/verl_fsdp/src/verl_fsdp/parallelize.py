"""From a model folder to a sharded model, top to bottom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import transformers
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from verl_engine.contract.errors import ModelError
from verl_fsdp.attention import PACKED_ATTENTION

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from verl_fsdp.config import Fsdp2Config


def load_model(config: Fsdp2Config, model_folder: Path) -> PreTrainedModel:
    """Load a causal LM in float32 on the CPU.

    Raises:
        ModelError: the folder does not hold such a model; the cause is chained.
    """
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            model_folder,
            dtype=torch.float32,
            attn_implementation=PACKED_ATTENTION if config.packing else "sdpa",
            local_files_only=True,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model folder {model_folder} does not hold a causal LM that transformers can load: {error}"
        ) from error
    return cast("PreTrainedModel", model)


def shard(model: PreTrainedModel, config: Fsdp2Config, mesh: DeviceMesh) -> FSDPModule:
    """Apply fully_shard to each block, then to what is left. Collectives: none.

    Parameters are gathered in ``param_dtype`` and reduced in float32; what each rank keeps of them is float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.param_dtype), reduce_dtype=torch.float32)
    for block in _blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)


def _blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Return the modules that the model's authors say must stay whole: its decoder layers.

    Raises:
        ModelError: the model names none.
    """
    names = set(cast("Any", model)._no_split_modules or ())  # noqa: SLF001 - transformers' own convention
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} names no block to shard (_no_split_modules={sorted(names)}); fsdp2 needs a model "
            "that does"
        )
    return blocks
