"""The config of a critic: of transformers' model for token classification, with a single label that is the value."""

import importlib
from pathlib import Path
from typing import Any

from verl_engine.contract.errors import ModelError


def become_critic(config: Any, folder: Path) -> None:
    """Turn the config of a language model or critic of transformers into a critic's, in place.

    A ModelError where transformers has no such class for the folder's model, or it is a classifier of several labels.
    """
    # By name: all that engines share works without a model library.
    known: Any = importlib.import_module("transformers").AutoModelForTokenClassification._model_mapping  # noqa: SLF001 - it has no public access
    if type(config) not in known:
        raise ModelError(
            f"engine.head=value: transformers has no token classifier for model type {config.model_type!r} of "
            f"{folder}, whose last layer would be the critic's; start the critic from a model of another type, such as "
            "llama, qwen3 or mistral, or use an algorithm without one"
        )
    if config.num_labels != 1 and any("Classification" in name for name in config.architectures or ()):
        raise ModelError(
            f"engine.head=value: {folder} holds a classifier of {config.num_labels} labels, and a value is one "
            "number; start the critic from a language model, a reward model of one label, or another critic"
        )
    config.num_labels = 1
    # A value is a regression: noise in its last layer would only blur it. Some models have 0.1 where nothing is said.
    config.classifier_dropout = 0.0
    config.architectures = [known[type(config)].__name__]
