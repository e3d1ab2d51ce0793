from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from plugins.verl_async.tests.embedded_models import PROMPTS, embedded, full_log_probs, qwen3, request
from verl_async.rollout.interface import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from verl_async.rollout.embedded import EmbeddedEngine
    from verl_async.rollout.interface import GenerationRequest

REQUESTS = [request(prompt, seed, num=16 + 4 * seed) for seed in range(3) for prompt in PROMPTS]


def interrupt_after(engine: EmbeddedEngine, num_forwards: int) -> None:
    """Let another thread interrupt during a forward of the next generate."""
    done = [0]

    def watch(*_: object) -> None:
        done[0] += 1
        if done[0] == num_forwards:
            handle.remove()
            thread = threading.Thread(target=engine.interrupt)
            thread.start()
            thread.join()

    handle = engine._model.register_forward_pre_hook(watch)


def resumed(requests: Sequence[GenerationRequest], results: Sequence[Generation]) -> list[GenerationRequest]:
    return [replace(one, so_far=result) for one, result in zip(requests, results, strict=True)]


@pytest.mark.parametrize("stops", [(1,), (3, 1, 6), (17, 2)])
def test_interrupted_and_resumed_equals_uninterrupted(stops: tuple[int, ...], tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    whole = engine.generate(REQUESTS)
    requests: Sequence[GenerationRequest] = REQUESTS
    num_tokens = 0
    for stop in stops:
        interrupt_after(engine, stop)
        results = engine.generate(requests)
        num_tokens += stop
        for one, result in zip(requests, results, strict=True):
            length = min(num_tokens, one.sampling.max_new_tokens)
            assert len(result.token_ids) == len(result.log_probs) == len(result.weight_versions) == length
            assert result.finish_reason == ("length" if length == one.sampling.max_new_tokens else "interrupted")
        requests = resumed(requests, results)
    for uninterrupted, last in zip(whole, engine.generate(requests), strict=True):
        assert last.token_ids == uninterrupted.token_ids
        assert last.log_probs == pytest.approx(uninterrupted.log_probs, abs=1e-5)
        assert last.finish_reason == uninterrupted.finish_reason == "length"


def test_after_new_weights_old_tokens_keep_their_log_probs_and_versions(tmp_path: Path) -> None:
    old, new = qwen3(0), qwen3(1)
    engine = embedded(old, tmp_path)
    interrupt_after(engine, 5)
    first = engine.generate(REQUESTS)
    kept = [list(result.log_probs) for result in first]
    engine.load_weights(new.state_dict().items())
    engine.commit_weights(3)
    for one, start, log_probs, result in zip(
        REQUESTS, first, kept, engine.generate(resumed(REQUESTS, first)), strict=True
    ):
        assert result.token_ids[:5] == start.token_ids
        assert result.log_probs[:5] == log_probs == start.log_probs, "what was handed in is not changed"
        assert result.weight_versions == [0] * 5 + [3] * (one.sampling.max_new_tokens - 5)
        wanted = full_log_probs(new, one.prompt_ids, result.token_ids)
        assert result.log_probs[5:] == pytest.approx(wanted[5:], abs=1e-5)


def test_interrupt_before_the_prompts_are_read_gives_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = embedded(qwen3(), tmp_path)
    check = engine._check

    def check_and_interrupt(requests: Sequence[GenerationRequest]) -> None:
        check(requests)
        engine.interrupt()

    monkeypatch.setattr(engine, "_check", check_and_interrupt)
    results = engine.generate(REQUESTS[:2])
    assert results == [Generation(), Generation()]
    assert results[0].finish_reason == "interrupted"
    monkeypatch.undo()
    assert engine.generate(resumed(REQUESTS[:2], results)) == engine.generate(REQUESTS[:2])


def test_interrupt_when_idle_has_no_effect(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    engine.interrupt()
    assert [result.finish_reason for result in engine.generate(REQUESTS)] == ["length"] * len(REQUESTS)


def test_finished_requests_come_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = embedded(qwen3(), tmp_path)
    [done] = engine.generate([request(num=4)])
    stop = done.token_ids[-1]
    monkeypatch.setattr(engine, "_model", None)  # not needed
    by_length, by_stop = engine.generate([request(num=4, so_far=done), request(num=9, stop=(stop,), so_far=done)])
    assert by_length == done
    assert (by_stop.token_ids, by_stop.finish_reason) == (done.token_ids, "stop")


def test_finished_and_unfinished_requests_go_together(tmp_path: Path) -> None:
    engine = embedded(qwen3(), tmp_path)
    [done, other] = engine.generate([request(num=4), request(seed=2, num=20)])
    part = Generation(other.token_ids[:6], other.log_probs[:6], other.weight_versions[:6])
    results = engine.generate([request(num=4, so_far=done), request(seed=2, num=20, so_far=part)])
    assert results[0] == done
    assert results[1].token_ids == other.token_ids


def test_a_running_generate_is_interrupted_from_another_thread(tmp_path: Path) -> None:
    """Without hooks: as the async loop does it, repeated until generate has returned."""
    engine = embedded(qwen3(), tmp_path)
    results: list[list[Generation]] = []
    thread = threading.Thread(target=lambda: results.append(engine.generate([request(num=120)] * 64)))
    thread.start()
    while thread.is_alive():
        engine.interrupt()
        thread.join(0.005)
    for result in results[0]:
        assert len(result.token_ids) == len(results[0][0].token_ids)
        assert result.finish_reason == ("length" if len(result.token_ids) == 120 else "interrupted")
