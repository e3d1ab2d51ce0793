"""Pauses in mid-generation: what comes back, what freezes, and what goes on."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest

from plugins.verl_async.tests.embedded_models import PROMPTS, embedded, full_log_probs, qwen3, request
from verl_async.errors import RolloutError
from verl_async.rollout.in_process import InlineTransport, as_bucket, generate
from verl_async.rollout.interface import Completion, Generation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from verl_async.rollout.embedded import EmbeddedEngine
    from verl_async.rollout.interface import GenerationRequest, PauseMode

REQUESTS = [request(prompt, seed, num=16 + 4 * seed) for seed in range(3) for prompt in PROMPTS]


def pause_after(engine: EmbeddedEngine, num_forwards: int, mode: PauseMode) -> threading.Event:
    """Let another thread pause during a forward from now on; the event is set when nothing moves any more."""
    done, quiet = [0], threading.Event()

    def pause() -> None:
        engine.pause(mode)
        quiet.set()

    def watch(*_: object) -> None:
        done[0] += 1
        if done[0] == num_forwards:
            handle.remove()
            threading.Thread(target=pause).start()
            while engine._mode is None:
                time.sleep(0.001)

    handle = engine._model.register_forward_pre_hook(watch)
    return quiet


def resumed(requests: Sequence[GenerationRequest], results: Sequence[Generation]) -> list[GenerationRequest]:
    return [replace(one, so_far=(result,)) for one, result in zip(requests, results, strict=True)]


def load(engine: EmbeddedEngine, model: PreTrainedModel, version: int) -> None:
    import zlib

    pairs = [as_bucket(name, weight) for name, weight in model.state_dict().items()]
    engine.begin_weights(version, [bucket for bucket, _ in pairs], InlineTransport())
    for _, content in pairs:
        engine.load_bucket(content, zlib.crc32(content))
    engine.commit_weights(version)


@pytest.mark.parametrize("stops", [(1,), (3, 1, 6), (17, 2)])
def test_aborted_and_resumed_equals_uninterrupted(stops: tuple[int, ...], tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    whole = generate(engine, REQUESTS)
    requests: Sequence[GenerationRequest] = REQUESTS
    num_tokens = 0
    for stop in stops:
        engine.resume()
        pause_after(engine, stop, "abort")
        results = generate(engine, requests)
        num_tokens += stop - (num_tokens > 0)  # contexts of two lengths or more are read by one forward, too
        for one, result in zip(requests, results, strict=True):
            length = len(result.token_ids)
            assert len(result.log_probs) == len(result.weight_versions) == length
            assert result.finish_reason == ("length" if length == one.sampling.max_new_tokens else "interrupted")
        assert any(result.finish_reason == "interrupted" for result in results)
        requests = resumed(requests, results)
    engine.resume()
    for uninterrupted, last in zip(whole, generate(engine, requests), strict=True):
        assert last.token_ids == uninterrupted.token_ids
        assert last.log_probs == pytest.approx(uninterrupted.log_probs, abs=1e-5)
        assert last.finish_reason == uninterrupted.finish_reason == "length"


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_after_new_weights_old_tokens_keep_their_log_probs_and_versions(mode: PauseMode, tmp_path: Path) -> None:
    old, new = qwen3(0), qwen3(1)
    engine = embedded(old, tmp_path)
    done: SimpleQueue[Completion] = SimpleQueue()
    quiet = pause_after(engine, 6, mode)
    engine.submit(REQUESTS, done.put)
    assert quiet.wait(10)
    load(engine, new, 3)
    back: list[Completion] = []
    held: list[list[float]] = []
    if mode == "abort":
        back = [done.get() for _ in REQUESTS]
        held = [list(one.generation.log_probs) for one in back]
        engine.submit([replace(one.request, so_far=(one.generation,)) for one in back], done.put)
    engine.resume()
    finished = [done.get() for _ in REQUESTS]
    assert [one.generation.log_probs for one in back] == held, "what was handed in is not changed"
    for one in finished:
        asked, result = one.request, one.generation
        num_old = result.weight_versions.count(0)
        assert 0 < num_old < len(result.token_ids) == asked.sampling.max_new_tokens
        assert result.weight_versions == [0] * num_old + [3] * (len(result.token_ids) - num_old)
        by_old = full_log_probs(old, asked.prompt_ids, result.token_ids)
        by_new = full_log_probs(new, asked.prompt_ids, result.token_ids)
        assert result.log_probs == pytest.approx([*by_old[:num_old], *by_new[num_old:]], abs=1e-5)


def test_what_was_submitted_before_a_pause_that_waits_finishes_and_what_comes_after_waits(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path, max_running=2)
    done: SimpleQueue[Completion] = SimpleQueue()
    quiet = pause_after(engine, 3, "wait")
    engine.submit(REQUESTS, done.put)
    while engine._mode is None:
        time.sleep(0.001)
    engine.submit(REQUESTS[:1], done.put)
    assert quiet.wait(10)
    assert done.qsize() == len(REQUESTS)
    assert (engine.stats().running, engine.stats().waiting) == (0, 1)
    engine.resume()
    reasons = [done.get(timeout=10).generation.finish_reason for _ in range(len(REQUESTS) + 1)]
    assert reasons == ["length"] * len(reasons)


def test_a_pause_that_waits_can_be_ended_by_an_abort(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    quiet = pause_after(engine, 3, "wait")
    threading.Timer(0.02, engine.pause, ["abort"]).start()
    results = generate(engine, [request(num=120)] * 2)
    assert quiet.wait(10)
    assert {result.finish_reason for result in results} <= {"interrupted", "length"}
    engine.resume()
    assert generate(engine, [request()])[0].finish_reason == "length"


@pytest.mark.parametrize("mode", ["abort", "keep", "wait"])
def test_a_pause_when_idle_has_no_effect(mode: PauseMode, tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    engine.pause(mode)
    engine.resume()
    assert [result.finish_reason for result in generate(engine, REQUESTS)] == ["length"] * len(REQUESTS)


def test_finished_requests_come_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = embedded(qwen3(), tmp_path)
    [done] = generate(engine, [request(num=4)])
    stop = done.token_ids[-1]
    monkeypatch.setattr(engine, "_model", None)  # not needed
    by_length, by_stop = generate(engine, [request(num=4, so_far=done), request(num=9, stop=(stop,), so_far=done)])
    assert by_length == done
    assert (by_stop.token_ids, by_stop.finish_reason) == (done.token_ids, "stop")


def test_finished_and_unfinished_samples_go_together(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    [done, other] = generate(engine, [request(num=4), request(seed=2, num=20)])
    part = Generation(other.token_ids[:6], other.log_probs[:6], other.weight_versions[:6])
    results = generate(engine, [request(num=4, so_far=done), request(seed=2, num=20, so_far=part)])
    assert results[0] == done
    assert results[1].token_ids == other.token_ids


def test_close_gives_back_what_is_unfinished(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    done: SimpleQueue[Completion] = SimpleQueue()
    engine.submit([request(num=120)] * 3, done.put)
    engine.close()
    engine.close()
    assert [(done.get().generation.finish_reason, one) for one in range(3)] == [
        ("interrupted", one) for one in range(3)
    ]
    with pytest.raises(RolloutError, match="closed"):
        engine.submit([request()], done.put)
    engine.pause("keep")  # nobody is left to wait for


def test_an_engine_that_fails_gives_the_error_with_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = embedded(qwen3(), tmp_path, max_running=2)
    monkeypatch.setattr(engine._batch.reader, "step", lambda _: 1 / 0)
    done: SimpleQueue[Completion] = SimpleQueue()
    engine.submit([request(num=20)] * 3, done.put)
    for _ in range(3):
        assert "failed: ZeroDivisionError" in str(done.get(timeout=10).error)
    with pytest.raises(RolloutError, match="ZeroDivisionError"):
        engine.submit([request()], done.put)
