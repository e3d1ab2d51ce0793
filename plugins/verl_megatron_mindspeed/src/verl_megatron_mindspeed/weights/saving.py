"""Writing a Hugging Face folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from huggingface_hub import save_torch_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_engine.engine.weights.model_files import saved_config
from verl_engine.engine.weights.model_folder import main_dtype
from verl_engine.engine.weights.module_weights import kept_by_first_rank, write_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from transformers import PreTrainedConfig

    from verl_engine.engine.weights.model_files import ModelFiles


def save_pretrained(
    weights: Iterable[tuple[str, torch.Tensor]], hf_config: PreTrainedConfig, files: ModelFiles, folder: Path
) -> None:
    """Write a Hugging Face folder; see core's `write_folder`.

    Args:
        weights: whole ones. The first rank keeps a copy of all of them on the CPU meanwhile, the others of none.
        hf_config: of the model; a critic's is that of a token classifier.
        files: of the folder that the model was loaded from.
        folder: replaced if it exists.
    Collectives: those of taking the weights, then a broadcast.
    """
    state = kept_by_first_rank(weights)
    architectures = list(hf_config.architectures or ())
    is_critic = any("Classification" in name for name in architectures)
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if not is_critic and isinstance(language_model, str):
        architectures = [language_model]

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        save_torch_state_dict(state, partial)
        dtype = main_dtype(tensor.dtype for tensor in state.values())
        files.write(partial, saved_config(files.config() or {}, dtype, architectures, is_critic=is_critic))

    write_folder(folder, write)
