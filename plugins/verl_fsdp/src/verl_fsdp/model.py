"""From a model folder to a model in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
import transformers

from verl_engine.contract.errors import ModelError
from verl_fsdp.attention import PACKED_ATTENTION

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from verl_fsdp.config import ShardedConfig


def load_model(config: ShardedConfig, model_folder: Path) -> PreTrainedModel:
    """Load the model on the CPU.

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
