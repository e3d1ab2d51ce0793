"""Pauses in mid-generation and when idle, and the end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_async.rollout.kit.bench import LONG, PROMPTS, request, require_log_probs
from verl_engine.contract.errors import EngineError
from verl_engine.testing.conformance.check import require

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_async.rollout.interface import Completion, GenerationRequest, PauseMode
    from verl_async.rollout.kit.bench import Bench, Stream


def long_requests(**changes: Any) -> list[GenerationRequest]:
    """Return requests that run for a while."""
    return [request(prompt, 7, num=LONG, **changes) for prompt in PROMPTS]


def in_mid_generation(stream: Stream, **changes: Any) -> list[GenerationRequest]:
    """Submit long requests behind a short one, and return when they are read and some tokens are drawn."""
    asked = long_requests(**changes)
    stream.submit(request(PROMPTS[1], num=4), *asked)
    stream.take()
    before = stream.engine.stats().drawn_tokens
    while stream.engine.stats().drawn_tokens < before + 4 and stream.is_empty():
        time.sleep(0.001)
    return asked


def abort(bench: Bench) -> None:
    """``abort`` gives unfinished samples back with their tokens at once; submitted again, they go on from them."""
    stream = bench.stream()
    asked = in_mid_generation(stream)
    stream.engine.pause("abort")
    back = stream.take(len(asked))
    nums = [len(one.generation.token_ids) for one in back]
    require(all(one.generation.finish_reason == "interrupted" for one in back), f"it went on to {nums} tokens")
    require(0 < max(nums) < LONG, f"samples came back with {nums} tokens")
    stream.require_silence()
    stream.engine.resume()
    stream.submit(*(replace(one.request, so_far=(one.generation,)) for one in back))
    _require_finished(stream.take(len(back)))


def keep(bench: Bench) -> None:
    """``keep`` freezes samples: nothing comes while it is paused, and after `resume` they go on to their end."""
    stream = bench.stream()
    asked = in_mid_generation(stream)
    stream.engine.pause("keep")
    drawn = stream.engine.stats().drawn_tokens
    stream.require_silence()
    stats = stream.engine.stats()
    require(stats.running + stats.waiting == len(asked), f"{len(asked)} samples are frozen, but stats() says {stats}")
    require(stats.drawn_tokens == drawn, "tokens were drawn during the pause")
    stream.engine.resume()
    _require_finished(stream.take(len(asked)))


def wait(bench: Bench) -> None:
    """``wait`` returns when all that was submitted before has come back finished; what is submitted later waits."""
    stream = bench.stream()
    in_mid_generation(stream)
    pausing = threading.Thread(target=partial(stream.engine.pause, "wait"), daemon=True)
    pausing.start()
    finished = stream.take(len(PROMPTS))
    pausing.join(bench.timeout_s)
    require(not pausing.is_alive(), "the pause did not return")
    _require_finished(finished)
    stream.submit(request(num=3))
    stream.require_silence()
    stream.engine.resume()
    stream.take()


def idle(bench: Bench) -> None:
    """A pause of each kind when idle returns, twice too; what is submitted meanwhile waits for `resume`."""
    stream = bench.stream()
    modes: list[PauseMode] = ["abort", "wait", *(["keep"] if "keep" not in bench.spec.gaps else [])]  # type: ignore[list-item]
    for mode in modes:
        for _ in range(2):
            stream.engine.pause(mode)
        stream.submit(request(num=3))
        stream.require_silence()
        stream.engine.resume()
        stream.engine.resume()
        [one] = stream.take()
        require(len(one.generation.token_ids) == 3, f"after a pause with {mode} came {one.generation}")  # noqa: PLR2004


def at_once(bench: Bench) -> None:
    """A pause with ``abort`` and `stats` are answered within a few tokens, however many requests wait."""
    stream = bench.stream()
    before = stream.engine.stats().drawn_tokens
    stream.submit(*(request(prompt, seed, num=LONG) for seed in range(50) for prompt in PROMPTS))
    while stream.engine.stats().drawn_tokens == before and stream.is_empty():
        time.sleep(0.001)
    before = stream.engine.stats().drawn_tokens
    stream.engine.pause("abort")
    back = stream.take(50 * len(PROMPTS))
    after = stream.engine.stats().drawn_tokens
    stream.engine.resume()
    require(any(one.generation.finish_reason == "interrupted" for one in back), "all samples were finished first")
    require(after - before < 50 * len(back), f"{after - before} tokens were drawn after the pause was asked for")


def close_in_generation(bench: Bench) -> None:
    """`close` in mid-generation gives every sample back; twice is harmless, and `submit` then raises."""
    stream = bench.fresh()
    asked = in_mid_generation(stream)
    stream.engine.close()
    back = stream.take(len(asked), may_fail=True)
    require(all(one.error or one.generation.finish_reason == "interrupted" for one in back), "it went on to the end")
    stream.engine.close()
    _require_raises(lambda: stream.submit(request()), "submit after close")


def dies(bench: Bench) -> None:
    """An engine that cannot go on gives every sample back with the error, and takes nothing more."""
    from verl_async.rollout.in_process import send_weights
    from verl_async.rollout.kit.models import build_model

    stream = bench.fresh()
    bad = {name: weight * float("nan") for name, weight in build_model("plain").state_dict().items()}
    send_weights(stream.engine, bad.items(), 1)
    asked = [request(prompt, num=20) for prompt in PROMPTS]
    try:
        stream.submit(*asked)
    except EngineError:
        return
    back = stream.take(len(asked), may_fail=True)
    require(all(one.error is not None for one in back), "samples of weights that are not finite came without an error")
    _require_raises(lambda: stream.generate(request()), "submit to an engine that has died")


def _require_finished(found: list[Completion]) -> None:
    for one in found:
        got = (len(one.generation.token_ids), one.generation.finish_reason)
        require(got == (LONG, "length"), f"a sample ended with {got[0]} of {LONG} tokens ({got[1]})")
    require_log_probs([one.request for one in found], [one.generation for one in found])


def _require_raises(function: Callable[[], object], what: str) -> None:
    try:
        function()
    except EngineError:
        return
    raise AssertionError(f"{what} raises no EngineError")
