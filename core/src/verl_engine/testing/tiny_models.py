"""Small Hugging Face model folders with random weights, for tests on a CPU."""

from pathlib import Path
from typing import Any, Final

import torch
import transformers

NUM_EXPERTS: Final = 4
EXPERTS_PER_TOKEN: Final = 2
"""Of `write_tiny_mixture`."""


def write_tiny_model(
    folder: Path, *, tied: bool = False, seed: int = 0, vocab_size: int = 32, attention_dropout: float = 0.0
) -> Path:
    """Write a two-layer Qwen3 model without a tokenizer, its output layer tied to the embedding or not."""
    config = transformers.Qwen3Config(
        **tiny_config(vocab_size), tie_word_embeddings=tied, attention_dropout=attention_dropout
    )
    return save_drawn(transformers.Qwen3ForCausalLM, config, folder, seed)


def write_absolute_position_model(folder: Path) -> Path:
    """Write a two-layer GPT-2, which learns a vector for each position: it knows where a sequence begins.

    Models with rotary positions only know distances, and give the same wherever position ids begin.
    """
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2
    )
    return save_drawn(transformers.GPT2LMHeadModel, config, folder)


def write_tiny_critic(folder: Path) -> Path:
    """Write the trunk of `write_tiny_model` with a head for token classification that has one label.

    The folder says nothing of the head's dropout, for which transformers then takes 0.1.
    """
    config = transformers.Qwen3Config(**tiny_config())
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Qwen3ForTokenClassification(config)
        torch.nn.init.normal_(model.score.weight, std=0.2)
        torch.nn.init.constant_(model.score.bias, 0.5)
        model.save_pretrained(folder)
    return folder


def write_tiny_mixture(folder: Path, num_layers: int = 2) -> Path:
    """Write a Qwen3 with a mixture of experts in each layer; the experts differ much."""
    config = transformers.Qwen3MoeConfig(
        **{**tiny_config(), "num_hidden_layers": num_layers},
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        initializer_range=0.2,
    )
    return save_drawn(transformers.Qwen3MoeForCausalLM, config, folder)


def save_drawn(model_class: Any, config: Any, folder: Path, seed: int = 0) -> Path:
    """Write a model with weights drawn by a seed; random numbers elsewhere go on as before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model_class(config).save_pretrained(folder)
    return folder


def tiny_config(vocab_size: int = 32) -> dict[str, Any]:
    """Return sizes for a two-layer model of Qwen3's kind."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
