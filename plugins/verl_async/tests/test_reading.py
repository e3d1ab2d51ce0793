"""How models read a batch: whatever lies beside it, a request gets the log-probs of a whole forward of it alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import transformers

from plugins.verl_async.tests.embedded_models import PROMPTS, SIZES, embedded, full_log_probs, qwen3, request
from verl_async.rollout.in_process import generate
from verl_async.rollout.reading import find_reading
from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

MODELS: Final[dict[str, tuple[type[Any], transformers.PreTrainedConfig, str]]] = {
    "soft cap": (
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config(**SIZES, head_dim=8, sliding_window=4, attn_logit_softcapping=0.5),
        "slots",
    ),
    "a window of all layers": (
        transformers.MistralForCausalLM,
        transformers.MistralConfig(**SIZES, sliding_window=4),
        "slots",
    ),
    "sinks, no sdpa": (
        transformers.GptOssForCausalLM,
        transformers.GptOssConfig(**SIZES, head_dim=8, sliding_window=4, num_local_experts=4, num_experts_per_tok=2),
        "slots",
    ),
    "attention of its own": (
        transformers.BloomForCausalLM,
        transformers.BloomConfig(vocab_size=20, hidden_size=32, n_layer=2, n_head=4),
        "mixed lengths",
    ),
    "positions by place in the row": (
        transformers.BartForCausalLM,
        transformers.BartConfig(
            vocab_size=20, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64,
            max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ),
        "equal lengths",
    ),
    "recurrent state in its modules": (
        transformers.RecurrentGemmaForCausalLM,
        transformers.RecurrentGemmaConfig(
            **(SIZES | {"num_hidden_layers": 3}), lru_width=32, attention_window_size=16
        ),
        "anew",
    ),
    "positions by what is no padding": (
        transformers.RobertaForCausalLM,
        transformers.RobertaConfig(**(SIZES | {"pad_token_id": 0}), is_decoder=True),
        "anew",
    ),
}  # fmt: skip


def build(model_class: type[Any], config: transformers.PreTrainedConfig) -> transformers.PreTrainedModel:
    """Build a model with weights large enough that every token matters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: transformers.PreTrainedModel = model_class._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1 and 0.01 < parameter.std() < 0.1:
                parameter.mul_(0.3 / parameter.std())
    return model


@pytest.mark.fault(2, 6, 8)
@pytest.mark.parametrize("kind", list(MODELS))
def test_log_probs_are_those_of_a_whole_forward(tmp_path: Path, kind: str) -> None:
    model_class, config, reading = MODELS[kind]
    model = build(model_class, config)
    engine = embedded(model, tmp_path)
    assert engine.reading == reading
    # Of different lengths, so that rows leave the batch at different times; the first prompt comes twice.
    requests = [request(prompt, seed, num=6 + seed) for seed, prompt in enumerate((*PROMPTS, PROMPTS[0]))]
    together = generate(engine, requests)
    for asked, found in zip(requests, together, strict=True):
        right = full_log_probs(model, asked.prompt_ids, found.token_ids)
        assert found.log_probs == pytest.approx(right, abs=2e-5)
    assert generate(engine, requests[1:2])[0].token_ids == together[1].token_ids


def test_keys_and_values_are_not_repeated_for_grouped_query_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = embedded(qwen3(), tmp_path)
    seen: list[tuple[torch.Size, torch.Size]] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watch(query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.append((query.shape, key.shape))
        return attend(query, key, *rest, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watch)
    [found] = generate(engine, [request(num=4)])
    assert [shapes[0][1:3] for shapes in seen[-2:]] == [(2, 2), (2, 2)], "four query heads, two of keys"
    assert found.log_probs == pytest.approx(full_log_probs(qwen3(), PROMPTS[0], found.token_ids), abs=1e-5)


class SelectsBySdpa(transformers.Qwen3ForCausalLM):
    """Selects tokens to attend to, beyond a number of them, only where the name of its attention is ``sdpa``."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        **options: Any,
    ) -> Any:
        found = super().forward(input_ids, attention_mask, position_ids, past_key_values, **options)
        if attention_mask is not None and self.config._attn_implementation != "sdpa":
            found.logits *= 1.0 + (attention_mask.shape[-1] > self.config.index_topk)
        return found


@pytest.mark.parametrize(
    ("model_class", "attention"), [(transformers.Qwen3ForCausalLM, "verl_async_grouped"), (SelectsBySdpa, "sdpa")]
)
def test_what_differs_only_beyond_many_tokens_is_seen_in_the_trial(model_class: type[Any], attention: str) -> None:
    config = transformers.Qwen3Config(**SIZES, head_dim=8)
    setattr(config, "index_topk", 4096)  # noqa: B010 - a setting of other models
    model = build(model_class, config)
    model.set_attn_implementation("sdpa")
    assert find_reading(model) == "slots"
    assert (model.config._attn_implementation, model.config.index_topk) == (attention, 4096)


def test_bfloat16_hides_what_padding_does_to_a_state(tmp_path: Path) -> None:
    config = transformers.BambaConfig(
        **SIZES, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_chunk_size=4
    )
    model = build(transformers.BambaForCausalLM, config)
    assert embedded(model, tmp_path / "exact").reading == "mixed lengths"
    assert embedded(model, tmp_path / "short", dtype="bfloat16").reading == "equal lengths"


def test_a_model_that_sees_what_comes_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES, is_decoder=False)
    with pytest.raises(ModelError, match=r"BertLMHeadModel is not a causal language model.*logits were .* off"):
        embedded(build(transformers.BertLMHeadModel, config), tmp_path)
