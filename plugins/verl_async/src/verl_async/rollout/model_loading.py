"""The model of a folder, ready to generate."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_engine.contract.errors import ModelError
from verl_engine.contract.model_code import why_not_loaded
from verl_engine.engine.exact_attention import needs_eager

if TYPE_CHECKING:
    from pathlib import Path


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a causal language model for generation; nothing is fetched from the hub.

    Raises:
        ModelError: the folder is missing, or transformers cannot make such a model of it; its own error is chained.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={folder} is not a Hugging Face model folder: it has no config.json")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelError(
            f"model.path={folder} cannot be loaded for the embedded rollout engine, which runs causal language "
            f"models of transformers: {why_not_loaded(error)}"
        ) from error
    assert isinstance(model, PreTrainedModel)
    if needs_eager(model.config):
        model.set_attn_implementation("eager")
    torch.nn.Module.to(model, device)  # Module's own: the override in transformers is untyped.
    model.requires_grad_(requires_grad=False)
    model.train(mode=False)
    return model
