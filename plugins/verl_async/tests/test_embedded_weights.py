from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from plugins.verl_async.tests.embedded_models import PROMPTS, embedded, qwen3, request, tied_llama
from verl_engine.contract.errors import WeightsError

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
    wanted = embedded(build(1), tmp_path / "new", dtype=dtype).generate(REQUESTS)
    before = engine.generate(REQUESTS)
    # In two buckets, as parameters without the tied alias.
    weights = list(build(1).named_parameters())
    engine.load_weights(weights[:3])
    engine.load_weights(weights[3:])
    engine.commit_weights(7)
    after = engine.generate(REQUESTS)
    assert engine.version == 7
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
    engine.load_weights({**state, **dict.fromkeys(names, embedding)}.items())
    engine.commit_weights(1)
    held = engine._model.state_dict()
    assert torch.equal(held["lm_head.weight"], embedding)
    assert torch.equal(held["model.embed_tokens.weight"], embedding)


def test_missing_weights_are_named_and_may_follow(tmp_path: Path) -> None:
    engine = embedded(qwen3(0), tmp_path)
    state = qwen3(1).state_dict()
    late = {name: state.pop(name) for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")}
    engine.load_weights(state.items())
    with pytest.raises(WeightsError, match=r"2 weights were not loaded .*: model.layers.1.mlp.up_proj.weight, model.n"):
        engine.commit_weights(1)
    assert engine.version == 0
    engine.load_weights(late.items())
    engine.commit_weights(1)
    assert engine.version == 1


def test_each_commit_wants_all_weights_anew(tmp_path: Path) -> None:
    engine = embedded(qwen3(0), tmp_path)
    engine.load_weights(qwen3(1).state_dict().items())
    engine.commit_weights(1)
    with pytest.raises(WeightsError, match="and 17 more"):
        engine.commit_weights(2)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"weight 'model.layers.2.mlp.up_proj.weight' is not in the rollout model"):
        embedded(qwen3(), tmp_path).load_weights([("model.layers.2.mlp.up_proj.weight", torch.zeros(64, 32))])


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"'model.norm.weight' has shape \(16,\), the rollout model wants \(32,\)"):
        embedded(qwen3(), tmp_path).load_weights([("model.norm.weight", torch.zeros(16))])


def test_generate_between_load_and_commit_is_refused(tmp_path: Path) -> None:
    engine = embedded(qwen3(0), tmp_path)
    engine.load_weights([("model.norm.weight", torch.ones(32))])
    with pytest.raises(WeightsError, match="loaded after version 0 but not committed"):
        engine.generate(REQUESTS)
