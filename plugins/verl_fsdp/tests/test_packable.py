"""How a model attends: packed where that is right, one sequence per row where not, and eagerly what sdpa leaves out."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import transformers

from verl_engine.batch.packed import SegmentRun
from verl_engine.contract.errors import ModelError
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.forward.attention import is_packed, packed_attention
from verl_fsdp.model.packable import check_heads, choose_attention, why_not_packed

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
PACKED: Final[dict[str, transformers.PreTrainedConfig]] = {
    "qwen3": transformers.Qwen3Config(**TINY),
    "qwen3_sliding": transformers.Qwen3Config(
        **TINY, use_sliding_window=True, sliding_window=4, max_window_layers=1, head_dim=8
    ),
    "mistral": transformers.MistralConfig(**TINY, sliding_window=4),
    "gemma2": transformers.Gemma2Config(**TINY, attn_logit_softcapping=2.0),
    "gemma3": transformers.Gemma3TextConfig(**TINY),
    "gpt2": transformers.GPT2Config(vocab_size=32, n_embd=32, n_layer=2, n_head=4),
    "gpt_oss": transformers.GptOssConfig(**TINY, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
}
ROWS: Final[dict[str, tuple[transformers.PreTrainedConfig, str]]] = {
    "qwen3_next": (
        transformers.Qwen3NextConfig(**TINY, layer_types=["linear_attention", "full_attention"]),
        r"Conv1d, a recurrent state, linear_attention",
    ),
    "mamba": (transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2), r"a recurrent state"),
    "lfm2": (transformers.Lfm2Config(**TINY, layer_types=["conv", "full_attention"]), r"Conv1d, conv"),
    "llama4": (
        transformers.Llama4TextConfig(**TINY, layer_types=["chunked_attention", "full_attention"], head_dim=8),
        r"chunked_attention",
    ),
    # Bloom takes the name of our attention, and then runs its own over all packed sequences as if they were one.
    "bloom": (transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4), r"in its own way"),
    "gptj": (
        transformers.GPTJConfig(vocab_size=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
        r"in its own way",
    ),
    # Its first position is 2; given packed ones, which begin at 0, its log-probs were off by 0.8 nats.
    "roberta": (
        transformers.RobertaConfig(
            vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            is_decoder=True,
        ),
        r"counts positions itself",
    ),
}  # fmt: skip


def build(config: transformers.PreTrainedConfig) -> PreTrainedModel:
    """Build the model with weights large enough that attention matters."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model


def attention_of(model: PreTrainedModel) -> str:
    return str(model.config._attn_implementation)


@pytest.mark.parametrize("kind", list(PACKED))
def test_models_whose_tokens_meet_in_attention_only_are_packed(kind: str) -> None:
    model = build(PACKED[kind])
    choose_attention(model, Fsdp2Config(learning_rate=1.0, sequence_parallel_size=2))
    assert is_packed(model)
    assert model.training


@pytest.mark.fault(6, 8)
@pytest.mark.parametrize("kind", list(ROWS))
def test_models_that_would_mix_packed_sequences_get_one_a_row(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    config, why = ROWS[kind]
    model = build(config)
    with pytest.raises(ModelError, match=rf"size=2 .* cannot be packed: .*{why}.*set engine.sequence_parallel_size=1"):
        choose_attention(model, Fsdp2Config(learning_rate=1.0, sequence_parallel_size=2))
    with caplog.at_level(logging.WARNING):
        choose_attention(model, Fsdp2Config(learning_rate=1.0))
    assert attention_of(model) in {"sdpa", "eager"}
    assert "one sequence per row, padded" in caplog.text


@pytest.mark.fault(2)
def test_a_soft_cap_is_computed_eagerly_in_rows() -> None:
    for cap, attention in ((2.0, "eager"), (None, "sdpa")):
        model = build(transformers.Gemma2Config(**TINY, attn_logit_softcapping=cap))
        choose_attention(model, Fsdp2Config(learning_rate=1.0, packing=False))
        assert attention_of(model) == attention


def test_a_model_that_leaks_where_nothing_says_so_is_found_by_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(PACKED["qwen3"])
    first = model.model.layers[0]
    plain = first.forward

    def leaking(hidden: torch.Tensor, **rest: Any) -> Any:
        before = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        return plain(hidden + before, **rest)

    monkeypatch.setattr(first, "forward", leaking)
    assert why_not_packed(model) is None
    choose_attention(model, Fsdp2Config(learning_rate=1.0))
    assert attention_of(model) == "sdpa"


def test_a_model_that_sees_what_comes_is_refused() -> None:
    config = transformers.RobertaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    with pytest.raises(
        ModelError, match=r"RobertaForCausalLM is not a causal language model.*tokens saw those that come after"
    ):
        choose_attention(build(config), Fsdp2Config(learning_rate=1.0))


def test_a_trial_runs_the_layers_of_each_kind_only() -> None:
    config = transformers.Qwen3Config(
        **(TINY | {"num_hidden_layers": 6}), use_sliding_window=True, sliding_window=4, max_window_layers=2, head_dim=8
    )
    model = build(config)
    ran: list[int] = []
    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    choose_attention(model, Fsdp2Config(learning_rate=1.0))
    assert set(ran) == {0, 1, 2}
    assert len(model.model.layers) == 6


def test_a_model_that_counts_its_layers_is_tried_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(PACKED["qwen3"])
    trunk = model.model
    plain = trunk.forward
    monkeypatch.setattr(trunk, "forward", lambda *args, **rest: (trunk.layers[1], plain(*args, **rest))[1])
    choose_attention(model, Fsdp2Config(learning_rate=1.0))
    assert is_packed(model)


def test_heads_that_do_not_divide_are_refused() -> None:
    config = Fsdp2Config(learning_rate=1.0, sequence_parallel_size=8)
    with pytest.raises(ModelError, match=r"sequence_parallel_size=8 .* 4 attention heads of Qwen3.*use one of 1, 2, 4"):
        check_heads(build(PACKED["qwen3"]), config)


HEADS: Final = torch.zeros(1, 1, 2, 4)
RUNS: Final = (SegmentRun(0, 1, 2),)


def attend(layer: torch.nn.Module | None = None, tokens: int = 2, **settings: Any) -> None:
    keys = torch.zeros(1, 1, tokens, 4)
    packed_attention(layer or torch.nn.Identity(), HEADS, keys, keys, None, **settings)


def test_a_model_that_drops_the_places_of_the_sequences_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Identity was not told where the packed sequences lie"):
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


def test_a_bias_of_positions_is_refused() -> None:
    with pytest.raises(ModelError, match=r"position_bias, which packed attention does not compute"):
        attend(packed_runs=RUNS, position_bias=torch.zeros(1, 1, 2, 2))


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


@pytest.mark.parametrize("runs_alone", [True, False])
def test_a_trial_that_would_run_too_many_weights_is_refused(runs_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its first layers do not run alone all of them do, if they are few enough."""
    model = build(transformers.Qwen3Config(**(TINY | {"num_hidden_layers": 4}), head_dim=8))

    def count_layers(decoder: Any, *_: object) -> None:
        if not runs_alone and len(decoder.layers) != 4:
            raise IndexError("layer 3")

    model.model.register_forward_pre_hook(count_layers)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr("verl_fsdp.model.trial._MOST_WEIGHTS", num_weights)
    choose_attention(model, Fsdp2Config(learning_rate=1.0))
    assert is_packed(model)
    monkeypatch.setattr("verl_fsdp.model.trial._MOST_WEIGHTS", num_weights - 1)
    if runs_alone:
        choose_attention(model, Fsdp2Config(learning_rate=1.0))
        monkeypatch.setattr("verl_fsdp.model.trial._MOST_WEIGHTS", 100)
    why = (
        "the layers up to the first of each kind" if runs_alone else r"all its layers .*alone fail: IndexError: layer 3"
    )
    with pytest.raises(ModelError, match=rf"Qwen3ForCausalLM cannot be tried .* {why}.* on the CPU, .* at most"):
        choose_attention(model, Fsdp2Config(learning_rate=1.0))
    assert model.training
    assert len(model.model.layers) == 4
