"""Tiny models with a tokenizer, and what plain transformers says of their tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import transformers

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

VOCABULARY: Final = 40
POSITIONS: Final = 512
EXPERTS_PER_TOKEN: Final = 2


def build_model(kind: str, seed: int = 0) -> Any:
    """Make a two-layer Qwen3 whose weights are large enough that each token depends on those before it.

    Args:
        kind: ``plain``; ``tied``, which has one tensor as embedding and output layer; or ``experts``, a mixture of
            eight of them in each layer.
        seed: of the weights.
    """
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": kind == "tied",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if kind == "experts":
        sizes |= {"num_experts": 8, "num_experts_per_tok": EXPERTS_PER_TOKEN, "moe_intermediate_size": 32}
        model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.4 / parameter.shape[-1] ** 0.5)
    return model.eval()


def write_model(kind: str, folder: Path) -> None:
    """Write the model of seed 0, and a tokenizer in which each token is a letter."""
    build_model(kind).save_pretrained(folder)
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({letter_of(token): token for token in range(VOCABULARY)}, letter_of(0)))
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def letter_of(token_id: int) -> str:
    """Return the text of a token."""
    return chr(ord("A") + token_id)


@torch.no_grad()
def log_probs_of(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> tuple[list[float], torch.Tensor]:
    """Read prompt and tokens at once.

    Returns:
        The log-prob of each token in nats, and [tokens, vocabulary] of all that could have been drawn.
    """
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp_TV = (logits.float() / temperature).log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), logp_TV
