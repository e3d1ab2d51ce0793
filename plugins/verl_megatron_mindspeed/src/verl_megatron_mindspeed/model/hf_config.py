"""What a Hugging Face folder's config says, in the words of transformers 4 and 5 alike."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import PreTrainedConfig

from verl_engine.contract.errors import ModelError
from verl_engine.contract.model_code import why_not_loaded
from verl_engine.engine.weights.critic_config import become_critic
from verl_megatron_mindspeed.config import MegatronConfig


@dataclass(frozen=True, slots=True)
class Rotary:
    """How positions turn queries and keys."""

    base: float
    kind: str
    """``default``, or the name of a way to stretch it."""
    settings: dict[str, Any]
    """The numbers of that way."""


def read_hf_config(config: MegatronConfig, folder: Path) -> PreTrainedConfig:
    """Read a folder's config; for a critic it is that of a token classifier with a single label.

    ModelError where the folder holds no config that transformers knows, or none that can be a critic's.
    """
    try:
        found = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds
        raise ModelError(
            f"model folder {folder} holds no model config that transformers can read: {why_not_loaded(error)}"
        ) from error
    hf_config = cast("PreTrainedConfig", found)
    if config.head == "value":
        become_critic(hf_config, folder)
    return hf_config


def read_rotary(hf_config: PreTrainedConfig) -> Rotary:
    """Return the rotary positions of a config: transformers 5 keeps all in one place, version 4 in two."""
    settings = dict(getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {})
    base = settings.pop("rope_theta", None) or getattr(hf_config, "rope_theta", None) or 10000.0
    kind = settings.pop("rope_type", None) or settings.pop("type", None) or "default"
    settings.pop("type", None)
    return Rotary(float(base), str(kind), settings)
