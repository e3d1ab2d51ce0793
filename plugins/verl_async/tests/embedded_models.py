"""Tiny random models, and short ways to make engines and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.interface import Generation, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

VOCABULARY = 20
PROMPTS: tuple[tuple[int, ...], ...] = ((5, 6, 7), (3,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12), (4, 4))
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen3(seed: int = 0) -> PreTrainedModel:
    """A Qwen3 whose logits differ enough that tokens depend on what came before."""
    return _spread(Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)), seed)


def tied_llama(seed: int = 0) -> PreTrainedModel:
    """A Llama whose output layer is its embedding."""
    return _spread(LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)), seed)


def sliding_qwen3(seed: int = 0) -> PreTrainedModel:
    """A Qwen3 whose second layer sees four tokens back only."""
    config = Qwen3Config(**SIZES, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    return _spread(Qwen3ForCausalLM(config), seed)


def _spread(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    model.train(mode=False)
    return model


def embedded(model: PreTrainedModel, folder: Path, **config: object) -> EmbeddedEngine:
    """An engine on the CPU with this model."""
    model.save_pretrained(folder)
    return EmbeddedEngine(EmbeddedConfig.model_validate({"device": "cpu", **config}), folder)


def request(
    prompt: tuple[int, ...] = PROMPTS[0],
    seed: int = 1,
    *,
    num: int = 12,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[int, ...] = (),
    so_far: Generation | None = None,
) -> GenerationRequest:
    """One request of one sample."""
    sampling = SamplingParams(num, temperature, top_p, top_k, stop)
    return GenerationRequest(prompt, sampling, (seed,), () if so_far is None else (so_far,))


@torch.no_grad()
def full_log_probs(
    model: PreTrainedModel, prompt: tuple[int, ...], tokens: list[int], temperature: float = 1.0
) -> list[float]:
    """Log-probabilities of the answer's tokens by one plain forward over prompt and answer."""
    logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits / temperature).log_softmax(-1)
    values: list[float] = log_probs.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    return values
