from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from plugins.verl_async.tests.embedded_models import (
    PROMPTS,
    embedded,
    full_log_probs,
    qwen3,
    request,
    sliding_qwen3,
    tied_llama,
)
from verl_async.rollout.embedded import EmbeddedEngine
from verl_async.rollout.embedded_plugin import EmbeddedConfig
from verl_async.rollout.in_process import generate, send_weights
from verl_engine.contract.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

MODELS = pytest.mark.parametrize("build", [qwen3, tied_llama, sliding_qwen3])


def hf_greedy(model: PreTrainedModel, prompt: tuple[int, ...], num: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator] # transformers' mixin has no types
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num, pad_token_id=0
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@MODELS
def test_greedy_equals_generate_of_transformers(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = build()
    results = generate(embedded(model, tmp_path), [request(prompt, num=30, temperature=0.0) for prompt in PROMPTS])
    wanted = [hf_greedy(model, prompt, 30) for prompt in PROMPTS]
    assert [result.token_ids for result in results] == wanted
    assert len({tuple(tokens) for tokens in wanted}) == len(PROMPTS), "the models should answer differently"


@MODELS
def test_log_probs_equal_a_full_forward(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = build()
    engine = embedded(model, tmp_path)
    # Lengths differ, so rows end and are dropped on the way.
    requests = [
        request(prompt, seed, num=5 + 7 * seed, temperature=temperature, top_p=0.95)
        for seed, (prompt, temperature) in enumerate(zip(PROMPTS, (1.0, 0.6, 1.4, 1.0), strict=True))
    ]
    for one, result in zip(requests, generate(engine, requests), strict=True):
        assert len(result.token_ids) == one.sampling.max_new_tokens
        assert result.weight_versions == [0] * len(result.token_ids)
        wanted = full_log_probs(model, one.prompt_ids, result.token_ids, one.sampling.temperature)
        assert result.log_probs == pytest.approx(wanted, abs=1e-5)


@MODELS
def test_a_request_gives_the_same_alone_and_with_others(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    engine = embedded(build(), tmp_path)
    requests = [request(prompt, seed, num=20 + seed) for seed in range(6) for prompt in PROMPTS]
    requests += [request(temperature=0.0), request(top_k=3), request(top_p=0.5)]
    for one, together in zip(requests, generate(engine, requests), strict=True):
        [alone] = generate(engine, [one])
        assert alone.token_ids == together.token_ids
        assert alone.log_probs == pytest.approx(together.log_probs, abs=1e-5)


def test_the_seed_decides(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    first, again, other = generate(engine, [request(seed=1), request(seed=1), request(seed=2)])
    assert first == again
    assert generate(engine, [request(seed=1)])[0].token_ids == first.token_ids
    assert other.token_ids != first.token_ids


def test_stop_tokens_end_and_are_kept(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    requests = [request(prompt, seed, num=40) for seed in range(4) for prompt in PROMPTS]
    free = generate(engine, requests)
    stops = [(free[i].token_ids[i % 11], 19) if i % 2 else () for i in range(len(requests))]
    stopped = generate(
        engine,
        [request(one.prompt_ids, one.seeds[0], num=40, stop=stop) for one, stop in zip(requests, stops, strict=True)],
    )
    for whole, cut, stop in zip(free, stopped, stops, strict=True):
        end = min((i + 1 for i, token in enumerate(whole.token_ids) if token in stop), default=40)
        assert cut.token_ids == whole.token_ids[:end]
        assert cut.log_probs == pytest.approx(whole.log_probs[:end], abs=1e-5)
        assert cut.finish_reason == ("stop" if stop else "length")
        assert len(cut.weight_versions) == end


def test_a_stop_token_as_the_last_one_allowed_is_a_stop(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    [free] = generate(engine, [request(num=1)])
    [result] = generate(engine, [request(num=1, stop=(free.token_ids[0],))])
    assert (result.token_ids, result.finish_reason) == (free.token_ids, "stop")


def test_top_k_and_top_p_draw_from_their_sets_only(tmp_path: Path) -> None:
    model = qwen3()
    engine = embedded(model, tmp_path)
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    ranked = probs.argsort(descending=True).tolist()
    nucleus = next(n for n in range(1, 20) if probs[ranked[:n]].sum() >= 0.6)
    seeds = range(300)
    drawn = generate(engine, [request(seed=seed, num=1, top_k=3) for seed in seeds])
    assert {result.token_ids[0] for result in drawn} == set(ranked[:3])
    drawn = generate(engine, [request(seed=seed, num=1, top_p=0.6) for seed in seeds])
    assert {result.token_ids[0] for result in drawn} == set(ranked[:nucleus])


def test_bfloat16_runs_and_reports_its_own_log_probs(tmp_path: Path) -> None:
    model = qwen3()
    engine = embedded(model, tmp_path, dtype="bfloat16")
    for prompt, result in zip(PROMPTS, generate(engine, [request(prompt) for prompt in PROMPTS]), strict=True):
        assert result.log_probs == pytest.approx(full_log_probs(model, prompt, result.token_ids), abs=0.2)


def test_no_requests_and_nothing_to_generate(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    assert generate(engine, []) == []
    [result] = generate(engine, [request(num=0)])
    assert (result.token_ids, result.finish_reason) == ([], "length")


def test_a_request_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    assert len(generate(engine, [request((1,) * 8, num=120)])[0].token_ids) == 120
    with pytest.raises(ConfigError, match=r"rollout.max_response_tokens=120 after a prompt of 9 .* positions for 128"):
        generate(engine, [request(), request((1,) * 9, num=120)])


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"requests\[0\].prompt_ids is empty"):
        generate(embedded(qwen3(), tmp_path), [request(())])


def test_logits_that_are_not_finite_are_an_error(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    state = {name: torch.full_like(weight, torch.nan) for name, weight in qwen3().state_dict().items()}
    send_weights(engine, state.items(), 4)
    for _ in range(2):  # the engine is gone, and says so again
        with pytest.raises(ModelError, match="not finite under weights of version 4"):
            generate(engine, [request()])


def test_a_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json"):
        EmbeddedEngine(EmbeddedConfig(device="cpu"), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(ModelError, match="cannot be loaded for the embedded rollout engine"):
        EmbeddedEngine(EmbeddedConfig(device="cpu"), tmp_path)
