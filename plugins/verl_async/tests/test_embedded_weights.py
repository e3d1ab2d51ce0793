"""New weights in the embedded engine: all of a plan, in place, and never between two versions."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import pytest
import torch

from plugins.verl_async.tests.embedded_models import PROMPTS, embedded, qwen3, request, tied_llama
from verl_async.rollout.in_process import InlineTransport, as_bucket, generate, send_weights
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.weights.bucket import combine_checksums

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

REQUESTS = [request(prompt, temperature=0.0) for prompt in PROMPTS]


@pytest.mark.parametrize("build", [qwen3, tied_llama])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_another_models_weights_it_generates_as_that_model(
    build: Callable[[int], PreTrainedModel], dtype: str, tmp_path: Path
) -> None:
    engine = embedded(build(0), tmp_path / "old", dtype=dtype)
    wanted = generate(embedded(build(1), tmp_path / "new", dtype=dtype), REQUESTS)
    before = generate(engine, REQUESTS)
    [found] = send_weights(engine, build(1).named_parameters(), 7).values()  # without the tied alias
    after = generate(engine, REQUESTS)
    contents = [as_bucket(*pair)[1] for pair in build(1).named_parameters()]
    assert engine.version == found.version == 7
    assert found.checksum == combine_checksums([zlib.crc32(content) for content in contents])
    assert [result.token_ids for result in after] == [result.token_ids for result in wanted]
    assert [result.log_probs for result in after] == [result.log_probs for result in wanted]
    assert [result.token_ids for result in after] != [result.token_ids for result in before]
    assert all(set(result.weight_versions) == {7} for result in after)


@pytest.mark.parametrize("names", [("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")])
def test_any_name_of_a_tied_weight_fills_it(names: tuple[str, ...], tmp_path: Path) -> None:
    engine = embedded(tied_llama(0), tmp_path)
    state = tied_llama(1).state_dict()
    embedding = state.pop("model.embed_tokens.weight")
    state.pop("lm_head.weight", None)
    send_weights(engine, {**state, **dict.fromkeys(names, embedding)}.items(), 1)
    held = engine._model.state_dict()
    assert torch.equal(held["lm_head.weight"], embedding)
    assert torch.equal(held["model.embed_tokens.weight"], embedding)


def test_a_plan_is_checked_whole_before_a_byte_comes(tmp_path: Path) -> None:
    engine = embedded(qwen3(0), tmp_path)
    state = qwen3(1).state_dict()

    def refused(weights: list[tuple[str, torch.Tensor]], message: str) -> None:
        with pytest.raises(WeightsError, match=message):
            send_weights(engine, weights, 1)

    some = [pair for pair in state.items() if pair[0] not in {"model.norm.weight", "model.layers.1.mlp.up_proj.weight"}]
    refused(some, r"2 weights are missing from the plan: model.layers.1.mlp.up_proj.weight, model.norm.weight; ")
    refused([*state.items(), *state.items()], "weights come twice in one plan: .* and 17 more")
    name = "model.layers.2.mlp.up_proj.weight"
    refused([(name, torch.zeros(64, 32))], f"weight '{name}' is not in the rollout model")
    refused([("model.norm.weight", torch.zeros(16))], r"has shape \(16,\), the rollout model wants \(32,\)")
    engine.resume()
    assert generate(engine, REQUESTS)[0].weight_versions == [0] * 12


def test_missing_and_foreign_buckets_are_named_and_the_rest_may_follow(tmp_path: Path) -> None:
    engine = embedded(qwen3(0), tmp_path)
    pairs = [as_bucket(name, weight) for name, weight in qwen3(1).state_dict().items()]
    plan = [bucket for bucket, _ in pairs]
    engine.pause("wait")
    with pytest.raises(WeightsError, match="came without begin_weights"):
        engine.load_bucket(pairs[0][1], 0)
    engine.begin_weights(1, plan, InlineTransport())
    for _, content in pairs[:-1]:
        engine.load_bucket(content, zlib.crc32(content))
    with pytest.raises(WeightsError, match="arrived with checksum"):
        engine.load_bucket(pairs[-1][1], 0)
    with pytest.raises(WeightsError, match=r"1 weights of version 1 were not loaded: lm_head.weight"):
        engine.commit_weights(1)
    with pytest.raises(WeightsError, match="loaded after version 0 but not committed"):
        engine.resume()
    engine.load_bucket(pairs[-1][1], zlib.crc32(pairs[-1][1]))
    with pytest.raises(WeightsError, match=f"beyond the {len(plan)} of the plan"):
        engine.load_bucket(pairs[-1][1], zlib.crc32(pairs[-1][1]))
    with pytest.raises(WeightsError, match="commit_weights of version 2, but begin_weights had 1"):
        engine.commit_weights(2)
    engine.commit_weights(1)
    engine.resume()
    assert generate(engine, REQUESTS)[0].weight_versions == [1] * 12


def test_weights_come_only_while_it_is_paused(tmp_path: Path) -> None:
    engine = embedded(qwen3(0), tmp_path)
    with pytest.raises(WeightsError, match="call pause first"):
        engine.begin_weights(1, [], InlineTransport())
