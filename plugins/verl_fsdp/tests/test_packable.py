"""Models that would mix packed sequences, or tokens of other ranks, are refused; those that would not are taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import transformers

from verl_engine.batch.packed import SegmentRun
from verl_engine.contract.errors import ModelError
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.forward.attention import packed_attention
from verl_fsdp.model.packable import check_packable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY: Final[dict[str, Any]] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
TAKEN: Final[dict[str, transformers.PreTrainedConfig]] = {
    "qwen3": transformers.Qwen3Config(**TINY),
    "qwen3_sliding": transformers.Qwen3Config(
        **TINY, use_sliding_window=True, sliding_window=4, max_window_layers=1, head_dim=8
    ),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=4),
    "gemma3": transformers.Gemma3TextConfig(**TINY),
    "gpt2": transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**TINY, num_experts=4, moe_intermediate_size=32),
}
REFUSED: Final[dict[str, tuple[transformers.PreTrainedConfig, str]]] = {
    "qwen3_next": (
        transformers.Qwen3NextConfig(**TINY, layer_types=["linear_attention", "full_attention"]),
        r"Conv1d, a recurrent state, linear_attention",
    ),
    "qwen3_5": (
        transformers.Qwen3_5TextConfig(**TINY, layer_types=["linear_attention", "full_attention"]),
        r"linear_attention",
    ),
    "mamba": (transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2), r"a recurrent state"),
    "lfm2": (transformers.Lfm2Config(**TINY, layer_types=["conv", "full_attention"]), r"Conv1d, conv"),
    "llama4": (
        transformers.Llama4TextConfig(**TINY, layer_types=["chunked_attention", "full_attention"]),
        r"chunked_attention",
    ),
}


def build(config: transformers.PreTrainedConfig) -> PreTrainedModel:
    """Build the model without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    return model


@pytest.mark.parametrize("kind", list(TAKEN))
def test_models_whose_tokens_meet_in_attention_only_are_taken(kind: str) -> None:
    check_packable(build(TAKEN[kind]), Fsdp2Config(learning_rate=1.0, sequence_parallel_size=2))


@pytest.mark.parametrize("kind", list(REFUSED))
def test_models_that_would_mix_packed_sequences_are_refused(kind: str) -> None:
    config, what = REFUSED[kind]
    model = build(config)
    with pytest.raises(ModelError, match=rf"run into each other \(.*{what}.*\).*set engine.packing=false$"):
        check_packable(model, Fsdp2Config(learning_rate=1.0))
    with pytest.raises(ModelError, match=r"packing=false and engine.sequence_parallel_size=1 \(it is 2\)"):
        check_packable(model, Fsdp2Config(learning_rate=1.0, sequence_parallel_size=2))
    check_packable(model, Fsdp2Config(learning_rate=1.0, packing=False))


@pytest.mark.parametrize("kind", ["bloom", "gptj"])
def test_models_with_an_attention_of_their_own_are_refused(kind: str) -> None:
    # Bloom takes the name of our attention, and then runs its own over all packed sequences as if they were one.
    config: Any = {
        "gptj": transformers.GPTJConfig(vocab_size=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=8),
        "bloom": transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4),
    }[kind]
    with pytest.raises(ModelError, match=r"computes attention in its own way.*set engine.packing=false$"):
        check_packable(build(config), Fsdp2Config(learning_rate=1.0))
    check_packable(build(config), Fsdp2Config(learning_rate=1.0, packing=False))


def test_a_model_that_counts_positions_from_elsewhere_is_refused() -> None:
    """Its first position is 2; given packed ones, which begin at 0, its log-probs were off by 0.8 nats."""
    config = transformers.RobertaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, is_decoder=True
    )
    with pytest.raises(ModelError, match=r"RobertaForCausalLM counts positions itself.*set engine.packing=false$"):
        check_packable(build(config), Fsdp2Config(learning_rate=1.0))
    check_packable(build(config), Fsdp2Config(learning_rate=1.0, packing=False))


def test_heads_that_do_not_divide_are_refused() -> None:
    config = Fsdp2Config(learning_rate=1.0, sequence_parallel_size=8)
    with pytest.raises(ModelError, match=r"sequence_parallel_size=8 .* 4 attention heads of Qwen3.*use one of 1, 2, 4"):
        check_packable(build(TAKEN["qwen3"]), config)


HEADS: Final = torch.zeros(1, 1, 2, 4)
RUNS: Final = (SegmentRun(0, 1, 2),)


def attend(layer: torch.nn.Module | None = None, tokens: int = 2, **settings: Any) -> None:
    keys = torch.zeros(1, 1, tokens, 4)
    packed_attention(layer or torch.nn.Identity(), HEADS, keys, keys, None, **settings)


def test_a_model_that_drops_the_places_of_the_sequences_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Identity was not told where the packed sequences lie.*packing=false"):
        attend()


def test_a_layer_that_is_not_causal_is_refused() -> None:
    layer = torch.nn.Identity()
    layer.is_causal = False  # type: ignore[assignment]
    for settings in ({"layer": layer}, {"is_causal": False}):
        with pytest.raises(ModelError, match=r"Identity is not causal"):
            attend(packed_runs=RUNS, **settings)


def test_a_layer_that_attends_to_other_tokens_than_its_own_is_refused() -> None:
    with pytest.raises(ModelError, match=r"attends from 2 tokens to 3, but the micro-batch has 2"):
        attend(packed_runs=RUNS, tokens=3)


def test_a_window_that_is_in_the_mask_only_is_refused() -> None:
    layer = torch.nn.Identity()
    config: Any = transformers.Qwen2Config(
        **TINY, use_sliding_window=True, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    )
    layer.config, layer.layer_idx = config, 0  # type: ignore[assignment]
    with pytest.raises(ModelError, match=r"sliding window that it does not pass to attention"):
        attend(layer, packed_runs=RUNS)
    attend(layer, packed_runs=RUNS, sliding_window=4)
    layer.layer_idx = 1  # type: ignore[assignment]
    attend(layer, packed_runs=RUNS)  # this layer has none
