"""Writing a Hugging Face folder."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_engine.engine.weights.model_files import ModelFiles
from verl_engine.engine.weights.model_folder import write_model_folder


def save_pretrained(
    weights: Iterable[tuple[str, torch.Tensor]], hf_config: PreTrainedConfig, files: ModelFiles, folder: Path
) -> None:
    """Write a Hugging Face folder; see core's `write_model_folder`.

    Args:
        weights: full ones.
        hf_config: of the model; a critic's is that of a token classifier.
        files: of the folder that the model was loaded from.
        folder: replaced if it exists.
    Collectives: those of taking the weights, then a broadcast.
    """
    architectures = list(hf_config.architectures or ())
    is_critic = any("Classification" in name for name in architectures)
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(hf_config.model_type)
    if not is_critic and isinstance(language_model, str):
        architectures = [language_model]
    write_model_folder(weights, files, folder, architectures)
