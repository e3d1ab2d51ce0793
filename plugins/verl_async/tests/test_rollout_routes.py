"""The experts of tokens: gathered row by row, kept with conversations, and alike in all ways to read a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from plugins.verl_async.tests.embedded_models import PROMPTS, SIZES, embedded, qwen3, request
from verl_async.rollout.in_process import generate
from verl_async.rollout.parked import ParkedContexts
from verl_async.rollout.reading import Reading, reader
from verl_async.rollout.routes import RouteRecorder, RowRoutes
from verl_engine.contract.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from pathlib import Path


def mixture(num_experts: int = 8) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **sizes, initializer_range=0.3))
    model.train(mode=False)
    return model


def tokens(*numbers: int) -> Any:
    """Experts of one layer, one of them a token."""
    return np.array(numbers, np.uint8)[:, None, None]


def test_experts_of_a_row_worked_by_hand() -> None:
    routes = RowRoutes(2, None)
    assert (routes.end, routes.array()) == (2, None)
    routes.add(tokens(50, 51, 52, 53), 4)
    routes.add(tokens(64), 5)
    routes.add(tokens(70, 71, 72, 73, 74, 75), 6)  # read again: only what is new counts
    found = routes.array()
    assert found is not None
    assert found.flatten().tolist() == [52, 53, 64, 75]
    assert found.dtype == np.uint8
    routes.cut(4)
    routes.cut(9)
    routes.add(tokens(84), 5)
    with pytest.raises(AssertionError, match="tokens 5 to 6 were never read"):
        routes.add(tokens(9), 7)
    again = RowRoutes(2, routes.array())
    assert again.end == 5
    assert np.array_equal(again.array(), tokens(52, 53, 84))  # type: ignore[arg-type]


def test_a_conversation_is_taken_up_only_with_the_experts_that_are_wanted() -> None:
    context = (1, 2, 3, 4, 5, 6)

    def taken(known: Any, experts_from: int | None) -> tuple[int, list[int]] | None:
        parked = ParkedContexts()
        parked.add("a", (1, 2, 3, 4, 9), [], known)
        prefix = parked.take("a", context, experts_from)
        if prefix is None:
            return None
        return prefix.num_tokens, [] if prefix.experts is None else prefix.experts.flatten().tolist()

    known = tokens(12, 13, 14)  # of the tokens from index 2 on
    assert taken(known, None) == taken(known, 2) == taken(known, 5) == (4, [12, 13])
    assert taken(known, 1) is None, "those of token 1 would lack"
    assert taken(None, 3) is None
    assert taken(None, 4) == taken(None, None) == (4, [])


@pytest.mark.parametrize("way", ["mixed lengths", "equal lengths", "anew"])
def test_each_way_to_read_says_the_same(way: Reading) -> None:
    model = mixture()
    contexts = [PROMPTS[0], PROMPTS[0], (8, 7, 3)] if way != "mixed lengths" else [PROMPTS[2], PROMPTS[1], PROMPTS[2]]
    recorder = RouteRecorder(model)
    read, slots = reader(model, way, 99, recorder), reader(model, "slots", 2**9, recorder)
    token = torch.tensor([4, 5, 6])
    with torch.inference_mode():
        for number in range(3):
            for one in (read, slots):
                one.step(token) if number else one.join(contexts)
            for found, right in zip(read.routes, slots.routes, strict=True):
                assert np.array_equal(found[-len(right) :], right)
                assert right.dtype == np.uint8
    assert [len(one) for one in slots.routes] == [1, 1, 1]


def test_a_turn_that_reads_only_what_is_new_has_the_experts_of_all(tmp_path: Path) -> None:
    engine = embedded(mixture(300), tmp_path / "model", routed_experts=True)
    turn = replace(request(PROMPTS[2]), affinity_key="conversation", routed_experts_from=0)
    try:
        [first] = generate(engine, [turn])
        turn = replace(turn, prompt_ids=(*turn.prompt_ids, *first.token_ids, 7))
        before = engine.stats().read_tokens
        [second] = generate(engine, [turn])
        assert engine.stats().read_tokens - before == 2, "the last token of the first turn, and the new one"
    finally:
        engine.close()
    old, new = first.routed_experts, second.routed_experts
    assert old is not None
    assert new is not None
    assert (old.shape, new.shape) == ((11 + 11, 2, 2), (24 + 11, 2, 2))
    assert new.dtype == np.int16
    assert np.array_equal(new[: len(old)], old)


def test_what_cannot_be_said_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no layer with experts; set it to false"):
        embedded(qwen3(), tmp_path / "dense", routed_experts=True)
    for setting, first, message in (
        (False, 0, r"requests\[0\].routed_experts_from=0 with rollout.routed_experts=false; set that to true"),
        (True, 3, r"requests\[0\].routed_experts_from=3 must be the index of one of its 3 tokens"),
        (True, -1, r"routed_experts_from=-1 must be"),
    ):
        engine = embedded(mixture(), tmp_path / "model", routed_experts=setting)
        try:
            with pytest.raises(ConfigError, match=message):
                generate(engine, [replace(request(), routed_experts_from=first)])
        finally:
            engine.close()
