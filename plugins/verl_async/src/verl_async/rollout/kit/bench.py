"""What a check works with: engines, requests, and completions as they come."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from verl_async.rollout.interface import GenerationRequest, SamplingParams
from verl_async.rollout.kit.models import build_model, log_probs_of, write_model
from verl_engine.contract.validation import validate
from verl_engine.testing.conformance.check import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from verl_async.rollout.interface import Completion, Generation, RolloutEngine
    from verl_async.rollout.spec import RolloutSpec

TOLERANCE_NATS: Final = 1e-4
PROMPTS: Final = ((5, 6, 7), (3,), (9, 8, 7, 6, 5, 4, 3, 2, 1, 11, 12), (4, 4, 30))
LONG: Final = 100
"""Tokens of a sample that must still be running when a short one is finished."""


def request(prompt: Sequence[int] = PROMPTS[0], *seeds: int, num: int = 12, **changes: Any) -> GenerationRequest:
    """Make a request; `changes` are fields of its sampling, or of itself."""
    own = {
        name: changes.pop(name)
        for name in ("so_far", "affinity_key", "log_probs", "routed_experts_from")
        if name in changes
    }
    return GenerationRequest(tuple(prompt), SamplingParams(num, **changes), seeds or (1,), **own)


class Stream:
    """Requests submitted to one engine, and the completions in the order in which they come."""

    def __init__(self, engine: RolloutEngine, timeout_s: float) -> None:
        self.engine = engine
        self._timeout_s = timeout_s
        self._arrived: SimpleQueue[Completion] = SimpleQueue()
        self._num_submitted = 0

    def submit(self, *requests: GenerationRequest, sealed: bool = False) -> None:
        """Submit requests; ids count them from 0."""
        named = [replace(one, request_id=str(self._num_submitted + place)) for place, one in enumerate(requests)]
        self._num_submitted += len(named)
        self.engine.submit(named, self._arrived.put, sealed=sealed)

    def take(self, count: int = 1, *, may_fail: bool = False) -> list[Completion]:
        """Wait for the next completions."""
        found: list[Completion] = []
        for _ in range(count):
            try:
                completion = self._arrived.get(timeout=self._timeout_s)
            except Empty:
                raise AssertionError(
                    f"only {len(found)} of {count} samples came within {self._timeout_s:g} s"
                ) from None
            if completion.error is not None and not may_fail:
                raise completion.error
            found.append(completion)
        return found

    def generate(self, *requests: GenerationRequest, sealed: bool = False) -> list[Generation]:
        """Submit requests and return all their samples, in order."""
        first = self._num_submitted
        self.submit(*requests, sealed=sealed)
        found = self.take(sum(len(one.seeds) for one in requests))
        places = {(int(one.request.request_id) - first, one.index): one.generation for one in found}
        require(len(places) == len(found), "a sample came twice")
        return [places[key] for key in sorted(places)]

    def is_empty(self) -> bool:
        """Whether no completion has come that was not taken."""
        return self._arrived.empty()

    def require_silence(self) -> None:
        """Fail where a completion comes that nobody waits for."""
        time.sleep(0.05)
        require(self.is_empty(), "completions came that nobody asked for, or came twice")


class Bench:
    """The engines of one kit. Shared ones stay for later checks; those of `fresh` are closed after the check."""

    def __init__(self, spec: RolloutSpec, section: Mapping[str, Any], folder: Path, timeout_s: float) -> None:
        self.spec = spec
        self.timeout_s = timeout_s
        self._section = section
        self._folder = folder
        self._shared: dict[str, RolloutEngine] = {}
        self._of_check = ExitStack()

    def folder(self, kind: str = "plain") -> Path:
        """Return the folder of a model."""
        folder = self._folder / kind
        if not folder.is_dir():
            write_model(kind, folder)
        return folder

    def fresh(self, kind: str = "plain", **settings: Any) -> Stream:
        """Build an engine for this check alone."""
        config = validate(self.spec.config_class, {**self._section, **settings}, at="rollout")
        engine: RolloutEngine = self.spec.load_engine()(config, self.folder(kind))
        self._of_check.callback(engine.close)
        return Stream(engine, self.timeout_s)

    def stream(self, kind: str = "plain") -> Stream:
        """Return requests to the engine that checks share; its weights are those of the folder."""
        if kind not in self._shared:
            config = validate(self.spec.config_class, self._section, at="rollout")
            self._shared[kind] = self.spec.load_engine()(config, self.folder(kind))
        return Stream(self._shared[kind], self.timeout_s)

    def end_check(self, *, failed: bool) -> None:
        """Close the engines of a check; after a failure the shared ones too, whose state nobody knows."""
        self._of_check.close()
        if failed:
            self.close()

    def replaced(self) -> Bench:
        """Return one like this, without its engines: one of them never comes back."""
        return Bench(self.spec, self._section, self._folder, self.timeout_s)

    def close(self) -> None:
        """Close the shared engines."""
        shared, self._shared = self._shared, {}
        for engine in shared.values():
            engine.close()


def require_log_probs(
    requests: Iterable[GenerationRequest],
    found: Iterable[Generation],
    seeds_by_version: Sequence[int] = (0,),
    kind: str = "plain",
) -> None:
    """Compare each token's log-prob with that of plain transformers, under the weights that drew it.

    Args:
        requests: of one sample each.
        found: their samples.
        seeds_by_version: of the weights that each version has.
        kind: of model.
    """
    models = [build_model(kind, seed) for seed in seeds_by_version]
    for asked, one in zip(requests, found, strict=True):
        sizes = {len(one.token_ids), len(one.log_probs), len(one.weight_versions)}
        require(len(sizes) == 1, f"tokens, log-probs and versions of one sample have lengths {sorted(sizes)}")
        temperature = asked.sampling.temperature or 1.0
        right = [log_probs_of(model, asked.prompt_ids, one.token_ids, temperature)[0] for model in models]
        for place, (version, log_prob) in enumerate(zip(one.weight_versions, one.log_probs, strict=True)):
            require(0 <= version < len(models), f"token {place} is of version {version}, which nobody sent")
            off = abs(log_prob - right[version][place])
            require(
                off <= TOLERANCE_NATS,
                f"the log-prob of token {place} at temperature {temperature:g} and version {version} is off by "
                f"{off:.3g} nats against plain transformers",
            )
