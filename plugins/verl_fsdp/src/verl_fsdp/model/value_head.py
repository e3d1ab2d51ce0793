"""Critics: transformers' models for token classification, with a single label that is the value.

Their last layer takes the place of a language model's. Loaded from the folder of a language model it is drawn anew;
a folder written by a critic has it.
"""

from pathlib import Path
from typing import Any

import transformers

from verl_engine.engine.weights.critic_config import become_critic
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
        ModelError: transformers has no such class for the model; see `become_critic`.
        OSError, ValueError: the folder holds no config that transformers knows.
    """
    if config.head != "value":
        return {}
    critic = transformers.AutoConfig.from_pretrained(model_folder, local_files_only=True, trust_remote_code=False)
    become_critic(critic, model_folder)
    return {"config": critic}
