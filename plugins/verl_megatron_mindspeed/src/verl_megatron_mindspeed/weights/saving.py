"""Writing a Hugging Face folder."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from huggingface_hub import save_torch_state_dict
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from verl_engine.engine.weights.module_weights import kept_by_first_rank, write_folder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import torch
    from transformers import PreTrainedConfig


def save_pretrained(
    weights: Iterable[tuple[str, torch.Tensor]],
    hf_config: PreTrainedConfig,
    dtype: torch.dtype,
    generation_config: str | None,
    folder: Path,
) -> None:
    """Write a Hugging Face folder; see core's `write_folder`.

    Args:
        weights: whole ones. The first rank keeps a copy of all of them on the CPU meanwhile, the others of none.
        hf_config: of the model; it stays as it is.
        dtype: of the weights.
        generation_config: the text of that file, if there is one.
        folder: replaced if it exists.
    Collectives: those of taking the weights, then a broadcast.
    """
    state = kept_by_first_rank(weights)
    config = copy.deepcopy(hf_config)
    config.dtype = str(dtype).removeprefix("torch.")
    is_critic = any("Classification" in name for name in config.architectures or ())
    language_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if not is_critic and isinstance(language_model, str):
        config.architectures = [language_model]

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        save_torch_state_dict(state, partial)
        config.save_pretrained(partial)
        if generation_config is not None:
            (partial / "generation_config.json").write_text(generation_config, encoding="utf-8")

    write_folder(folder, write)
