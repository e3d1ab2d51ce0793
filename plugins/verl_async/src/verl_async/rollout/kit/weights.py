"""New weights: all, once, in place, acknowledged; and each token says which drew it."""

from __future__ import annotations

import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from verl_async.rollout.in_process import InlineTransport, as_bucket, send_weights
from verl_async.rollout.interface import Acknowledgement
from verl_async.rollout.kit.bench import LONG, PROMPTS, request, require_log_probs
from verl_async.rollout.kit.models import build_model
from verl_async.rollout.kit.pauses import in_mid_generation
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.weights.bucket import combine_checksums
from verl_engine.testing.conformance.check import require

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from verl_async.rollout.interface import RolloutEngine
    from verl_async.rollout.kit.bench import Bench

ASKED = [request(prompt, temperature=0.0) for prompt in PROMPTS]


def weights_of(kind: str, seed: int) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of a model as a trainer sends them: without aliases of tied ones."""
    return [(name, parameter.detach()) for name, parameter in build_model(kind, seed).named_parameters()]


def used(bench: Bench) -> None:
    """After `commit_weights` the new weights generate, and every receiver acknowledges version and checksum."""
    stream = bench.fresh()
    weights = weights_of("plain", 1)
    found = send_weights(stream.engine, weights, 1)
    sent = Acknowledgement(1, combine_checksums([zlib.crc32(as_bucket(*pair)[1]) for pair in weights]))
    require(
        set(found) == set(stream.engine.receivers()), f"{sorted(found)} of {stream.engine.receivers()} acknowledged"
    )
    require(all(one == sent for one in found.values()), f"acknowledged {found}, but {sent} was sent")
    require(stream.engine.version == 1, f"the engine's version is {stream.engine.version}, not 1")
    found_samples = stream.generate(*ASKED)
    require({v for one in found_samples for v in one.weight_versions} == {1}, "tokens are not of version 1")
    require_log_probs(ASKED, found_samples, (0, 1))


def version_per_token(bench: Bench) -> None:
    """A sample that goes on after an update says of each token which weights drew it; its log-probs are theirs."""
    stream = bench.fresh()
    asked = in_mid_generation(stream)
    stream.engine.pause("abort")
    back = stream.take(len(asked))
    load_weights(stream.engine, weights_of("plain", 1), 1)
    stream.engine.resume()
    stream.submit(*(replace(one.request, so_far=(one.generation,)) for one in back))
    _require_two_versions(stream.take(len(back)))


def keep_over_update(bench: Bench) -> None:
    """Samples that were frozen over an update go on with the new weights, and log-probs are right on both sides."""
    stream = bench.fresh()
    asked = in_mid_generation(stream)
    stream.engine.pause("keep")
    load_weights(stream.engine, weights_of("plain", 1), 1)
    stream.engine.resume()
    _require_two_versions(stream.take(len(asked)))


def cache_is_dropped(bench: Bench) -> None:
    """What was read under old weights is not used under new ones, also with an affinity key."""
    stream = bench.fresh()
    turn = request(PROMPTS[2], affinity_key="conversation")
    [answer] = stream.generate(turn)
    send_weights(stream.engine, weights_of("plain", 1), 1)
    turn = replace(turn, prompt_ids=(*turn.prompt_ids, *answer.token_ids, 7))
    require_log_probs([turn], stream.generate(turn), (0, 1))


def tied(bench: Bench) -> None:
    """Tied embeddings are right after each of three updates, in the output layer too."""
    stream = bench.fresh("tied")
    for version in (1, 2, 3):
        send_weights(stream.engine, weights_of("tied", version), version)
        require_log_probs(ASKED, stream.generate(*ASKED), (0, 1, 2, 3), "tied")


def incomplete(bench: Bench) -> None:
    """A plan that lacks a weight, and a commit before all buckets have come, are refused; the rest may follow."""
    stream = bench.fresh()
    weights = weights_of("plain", 1)
    engine = stream.engine
    engine.pause("wait")
    _require_refused(lambda: load_weights(engine, weights[:-1], 1), "a plan without the last weight")
    pairs = _begin(engine, weights, 1)
    for _, content in pairs[:-1]:
        engine.load_bucket(content, zlib.crc32(content))
    _require_refused(lambda: engine.commit_weights(1), "commit_weights before the last bucket")
    _require_refused(engine.resume, "resume between two versions")
    content = pairs[-1][1]
    engine.load_bucket(content, zlib.crc32(content))
    engine.commit_weights(1)
    engine.resume()
    require_log_probs(ASKED, stream.generate(*ASKED), (0, 1))


def wrong(bench: Bench) -> None:
    """Unknown names, wrong shapes, other bytes than were sent, and another version are refused."""
    engine = bench.fresh().engine
    engine.pause("wait")
    weights = weights_of("plain", 1)
    name, weight = weights[-1]
    _require_refused(lambda: load_weights(engine, [*weights, ("nobody.weight", weight)], 1), "an unknown name")
    _require_refused(lambda: load_weights(engine, [*weights[:-1], (name, weight[1:])], 1), "a wrong shape")
    pairs = _begin(engine, weights, 1)
    _require_refused(lambda: engine.load_bucket(pairs[0][1], 12345), "a bucket with another checksum")
    for _, content in _begin(engine, weights, 1):
        engine.load_bucket(content, zlib.crc32(content))
    _require_refused(lambda: engine.commit_weights(2), "commit_weights of a version that was not begun")
    engine.commit_weights(1)


def doubled(bench: Bench) -> None:
    """A weight twice in a plan, and a bucket beyond the plan, are refused."""
    engine = bench.fresh().engine
    engine.pause("wait")
    weights = weights_of("plain", 1)
    _require_refused(lambda: load_weights(engine, [*weights, weights[0]], 1), "a weight that comes twice")
    pairs = _begin(engine, weights, 1)
    for _, content in pairs:
        engine.load_bucket(content, zlib.crc32(content))
    content = pairs[-1][1]
    _require_refused(lambda: engine.load_bucket(content, zlib.crc32(content)), "a bucket beyond the plan")
    engine.commit_weights(1)


def save_pretrained(bench: Bench) -> None:
    """`save_pretrained` writes the weights in use as a model folder, and returns their dtype."""
    stream = bench.fresh()
    send_weights(stream.engine, weights_of("plain", 1), 1)
    with tempfile.TemporaryDirectory() as folder:
        dtype = stream.engine.save_pretrained(Path(folder) / "saved")
        saved = dict(transformers.Qwen3ForCausalLM.from_pretrained(Path(folder) / "saved").named_parameters())
    sent = dict(weights_of("plain", 1))
    require(dtype == "float32", f"the dtype is said to be {dtype!r}")
    wrong = [name for name, weight in sent.items() if name not in saved or not torch.equal(saved[name], weight)]
    require(not wrong, f"the saved weights {', '.join(wrong[:5])} differ from those that were sent")


def only_paused(bench: Bench) -> None:
    """Weights are refused while the engine is not paused."""
    engine = bench.fresh().engine
    _require_refused(lambda: _begin(engine, weights_of("plain", 1), 1), "begin_weights without a pause")


def _begin(engine: RolloutEngine, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> list[tuple[Any, Any]]:
    pairs = [as_bucket(name, weight) for name, weight in weights]
    engine.begin_weights(version, [bucket for bucket, _ in pairs], InlineTransport())
    return pairs


def load_weights(engine: RolloutEngine, weights: Sequence[tuple[str, torch.Tensor]], version: int) -> None:
    """Send weights to an engine that is paused."""
    for _, content in _begin(engine, weights, version):
        engine.load_bucket(content, zlib.crc32(content))
    engine.commit_weights(version)


def _require_two_versions(found: list[Any]) -> None:
    for one in found:
        versions = one.generation.weight_versions
        require(versions == sorted(versions) and versions[-1] == 1, f"versions of the tokens are {versions}")
        require(len(one.generation.token_ids) == LONG, "a sample was cut")
    require(any(0 in one.generation.weight_versions for one in found), "all tokens are of version 1, also the old ones")
    require_log_probs([one.request for one in found], [one.generation for one in found], (0, 1))


def _require_refused(function: Callable[[], object], what: str) -> None:
    try:
        function()
    except WeightsError:
        return
    raise AssertionError(f"{what} raises no WeightsError")
