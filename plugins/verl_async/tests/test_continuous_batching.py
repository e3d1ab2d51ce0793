"""Requests join and leave between two tokens: what each draws is its own, and prompts are read once."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
from transformers import PreTrainedTokenizerFast

from plugins.verl_async.tests.embedded_models import (
    PROMPTS,
    VOCABULARY,
    embedded,
    full_log_probs,
    qwen3,
    request,
    sliding_qwen3,
)
from verl_async.rollout.in_process import generate
from verl_async.rollout.interface import SamplingParams
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedModel

    from verl_async.rollout.embedded import EmbeddedEngine
    from verl_async.rollout.interface import Completion, Generation, GenerationRequest

MANY = [request(prompt, seed, num=4 + (7 * seed) % 23) for seed in range(6) for prompt in PROMPTS]


def require_equal(found: Generation, alone: Generation) -> None:
    assert found.token_ids == alone.token_ids
    assert found.log_probs == pytest.approx(alone.log_probs, abs=1e-5)


def alone(engine: EmbeddedEngine, requests: list[GenerationRequest]) -> list[Generation]:
    return [generate(engine, [one])[0] for one in requests]


@pytest.mark.parametrize("build", [qwen3, sliding_qwen3])
def test_samples_that_join_a_running_batch_draw_what_they_draw_alone(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    engine = embedded(build(), tmp_path, max_running=5)
    assert engine.reading == "slots"
    wanted = alone(engine, MANY)
    done: SimpleQueue[Completion] = SimpleQueue()
    for place, one in enumerate(MANY):
        engine.submit([replace(one, request_id=str(place))], done.put)
        time.sleep(0.002)
    found = [done.get(timeout=20) for _ in MANY]
    order = [int(completion.request.request_id) for completion in found]
    assert order != sorted(order), "they end as they are finished"
    for place, completion in zip(order, found, strict=True):
        require_equal(completion.generation, wanted[place])


def test_more_than_the_cache_holds_wait_and_are_read_again(tmp_path: Path) -> None:
    model = qwen3()
    long = [request(prompt, seed, num=40) for seed in range(2) for prompt in PROMPTS]
    wanted = alone(embedded(model, tmp_path / "wide"), long)
    engine = embedded(model, tmp_path / "narrow", max_cache_tokens=90)
    rooms = [(0, 0)]
    engine._model.register_forward_hook(lambda *_: rooms.append(engine._batch.reader._slots.room))  # type: ignore[union-attr]
    for found, right in zip(generate(engine, long), wanted, strict=True):
        require_equal(found, right)
    assert max(rows * tokens for rows, tokens in rooms) <= 90
    assert engine.stats().read_tokens > sum(len(one.prompt_ids) for one in long), "none had to wait again"
    with pytest.raises(ConfigError, match=r"rollout.max_cache_tokens=90 has no room for the 3 tokens of requests\[0\]"):
        generate(engine, [request(num=100)])


def test_a_sample_that_needs_the_whole_cache_runs_alone_and_the_next_ones_after_it(tmp_path: Path) -> None:
    model = qwen3()
    requests = [request((1,) * 30, seed, num=6) for seed in range(3)]
    wanted = alone(embedded(model, tmp_path / "wide"), requests)
    engine = embedded(model, tmp_path / "narrow", max_cache_tokens=36)
    for found, right in zip(generate(engine, requests), wanted, strict=True):
        require_equal(found, right)


def test_the_prompt_of_a_group_is_read_once_and_each_sample_has_its_seed(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    prompt = PROMPTS[2]
    group = replace(request(prompt, num=8), seeds=(5, 6, 7, 5))
    found = generate(engine, [group, request((3,), 9)])
    assert engine.stats().read_tokens == len(prompt) + 1
    assert found[0] == found[3]
    singles = alone(engine, [request(prompt, seed, num=8) for seed in (5, 6, 7)])
    for generation, single in zip(found, singles, strict=False):
        require_equal(generation, single)
    # Unfinished samples of one group have different lengths, and go on together.
    parts = tuple(replace(one, token_ids=one.token_ids[:n], log_probs=one.log_probs[:n],
                          weight_versions=one.weight_versions[:n]) for n, one in enumerate(found[:4]))  # fmt: skip
    for generation, whole in zip(generate(engine, [replace(group, so_far=parts)]), found, strict=False):
        require_equal(generation, whole)


@pytest.mark.parametrize("build", [qwen3, sliding_qwen3])
def test_the_next_turn_of_a_conversation_reads_only_what_is_new(
    build: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model = build()
    engine = embedded(model, tmp_path)
    turns = [replace(request(prompt, 3, num=5), affinity_key=str(place)) for place, prompt in enumerate(PROMPTS)]
    num_read = 0
    for _ in range(3):
        answers = generate(engine, turns)
        turns = [
            replace(turn, prompt_ids=(*turn.prompt_ids, *answer.token_ids, 7, 1))
            for turn, answer in zip(turns, answers, strict=True)
        ]
        num_read = engine.stats().read_tokens
    # The last drawn token was not read; then come the two new ones. Who has an equal context reads nothing.
    other = replace(turns[1], affinity_key="", seeds=(8,))
    answers = generate(engine, [*turns, other])
    assert engine.stats().read_tokens - num_read == 3 * len(turns)
    for turn, answer in zip([*turns, other], answers, strict=True):
        assert answer.log_probs == pytest.approx(full_log_probs(model, turn.prompt_ids, answer.token_ids), abs=1e-5)


def test_what_is_kept_of_conversations_makes_room_for_others(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path, max_cache_tokens=100)
    first = replace(request((1,) * 30, num=6), affinity_key="a")
    generate(engine, [first])
    assert engine.stats().cache_tokens == 35
    generate(engine, [request((2,) * 30, num=15)] * 2)
    assert engine.stats().cache_tokens == 0
    generate(engine, [first])
    assert engine.stats().read_tokens == 30 + 30 + 30


def test_sealed_requests_run_whole_and_alone(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    sizes: list[int] = []
    engine._model.register_forward_pre_hook(
        lambda _, __, arguments: sizes.append(len(arguments["input_ids"])), with_kwargs=True
    )
    done: SimpleQueue[Completion] = SimpleQueue()
    engine.pause("keep")
    for sealed in (False, True, False):
        engine.submit([request(prompt, num=3) for prompt in PROMPTS[:3]], done.put, sealed=sealed)
    engine.resume()
    found = [done.get(timeout=10).generation for _ in range(9)]
    assert sizes == [3, 3, 3] * 3
    assert found[:3] == found[3:6] == found[6:]


def save_tokenizer(folder: Path) -> None:
    """Token i is the i-th letter."""
    from tokenizers import Tokenizer, decoders, models

    letters = {chr(ord("a") + place): place for place in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, "a"))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def test_a_stop_string_ends_a_sample_where_its_text_is_complete(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    asked = request(num=60)
    strings = ("zz", "bc")
    with_strings = replace(asked, sampling=SamplingParams(60, stop_strings=strings))
    with pytest.raises(ConfigError, match="has no tokenizer"):
        generate(engine, [with_strings])
    save_tokenizer(tmp_path)
    [free] = generate(engine, [asked])
    text = "".join(chr(ord("a") + token) for token in free.token_ids)
    pair = text[20:22]
    cut = replace(asked, sampling=SamplingParams(60, stop_strings=("zz", pair)))
    [found] = generate(engine, [cut])
    end = text.index(pair) + 2
    assert (found.token_ids, found.finish_reason) == (free.token_ids[:end], "stop")
    # Also across an interruption that falls between its two letters.
    part = replace(free, token_ids=free.token_ids[: end - 1], log_probs=[], weight_versions=[0] * (end - 1))
    [resumed] = generate(engine, [replace(cut, so_far=(part,))])
    assert (resumed.token_ids, resumed.finish_reason) == (free.token_ids[:end], "stop")


def test_log_probs_that_nobody_wants_are_left_out(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    with_them, without = generate(engine, [request(), replace(request(), log_probs=False)])
    assert (without.token_ids, without.log_probs) == (with_them.token_ids, [])


def test_requests_are_checked_before_any_is_taken(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    whole = request()
    for wrong, message in (
        (replace(whole, seeds=()), r"requests\[1\].seeds is empty"),
        (replace(whole, so_far=tuple(generate(engine, [whole, whole]))), r"so_far has 2 entries for 1 seeds"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine.submit([whole, wrong], lambda _: pytest.fail("taken"))


def test_many_threads_may_submit_while_others_look_and_pause(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path, max_running=7)
    wanted = alone(engine, MANY)
    results: deque[tuple[int, Generation]] = deque()

    def one(place: int) -> None:
        results.append((place, generate(engine, [MANY[place]])[0]))

    threads = [threading.Thread(target=one, args=(place,)) for place in range(len(MANY))]
    for thread in threads:
        thread.start()
    for _ in range(5):
        engine.pause("keep")
        assert engine.stats().running <= 7
        engine.resume()
    for thread in threads:
        thread.join(20)
    for place, found in results:
        require_equal(found, wanted[place])
    assert len(results) == len(MANY)
