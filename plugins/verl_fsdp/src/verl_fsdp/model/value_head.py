"""Critics: transformers' models for token classification, with a single label that is the value.

Their last layer takes the place of a language model's. Loaded from the folder of a language model it is drawn anew;
a folder written by a critic has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import transformers

from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from verl_fsdp.config import ShardedConfig


def auto_class(config: ShardedConfig) -> Any:
    """Return transformers' class to load the model with."""
    is_critic = config.head == "value"
    return transformers.AutoModelForTokenClassification if is_critic else transformers.AutoModelForCausalLM


def what_it_is(config: ShardedConfig) -> str:
    """Name what is loaded, for messages."""
    return "critic (token classifier)" if config.head == "value" else "causal LM"


def load_arguments(config: ShardedConfig, model_folder: Path) -> dict[str, Any]:
    """Return further arguments of ``from_pretrained``.

    Raises:
        ModelError: transformers has no such class for the model.
        OSError, ValueError: the folder holds no config that transformers knows.
    """
    return {"config": _critic_config(model_folder)} if config.head == "value" else {}


def _critic_config(model_folder: Path) -> PreTrainedConfig:
    config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(
        model_folder, local_files_only=True, trust_remote_code=False
    )
    known: Any = transformers.AutoModelForTokenClassification._model_mapping  # noqa: SLF001 - it has no public access
    if type(config) not in known:
        raise ModelError(
            f"engine.head=value: transformers has no token classifier for model type {config.model_type!r} of "
            f"{model_folder}, whose last layer would be the critic's; start the critic from a model of another type, "
            "such as llama, qwen3 or mistral, or use an algorithm without one"
        )
    if config.num_labels != 1 and any("Classification" in name for name in config.architectures or ()):
        raise ModelError(
            f"engine.head=value: {model_folder} holds a classifier of {config.num_labels} labels, and a value is one "
            "number; start the critic from a language model, a reward model of one label, or another critic"
        )
    config.num_labels = 1
    # A value is a regression: noise in its last layer would only blur it. Some models have 0.1 where nothing is said.
    config.classifier_dropout = 0.0
    return config
