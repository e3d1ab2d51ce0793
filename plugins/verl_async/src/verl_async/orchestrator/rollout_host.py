"""A rollout engine in its process, as the rollout loop uses it: a batch at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_async.rollout.in_process import generate
from verl_engine.contract.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from verl_async.rollout.interface import (
        Acknowledgement,
        Generation,
        GenerationRequest,
        RolloutEngine,
        WeightTransport,
    )
    from verl_engine.engine.weights.bucket import WeightBucket


class RolloutHost:
    """Blocking calls around a `RolloutEngine`; an actor or a test runs them in a thread."""

    def __init__(self, engine: RolloutEngine) -> None:
        """Take an engine that has loaded its model."""
        self.engine = engine
        self._is_loading = False

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one batch to its end, or to an `interrupt`; returns its samples in order."""
        self.engine.resume()
        return generate(self.engine, requests, sealed=True) if requests else []

    def interrupt(self) -> None:
        """Have a running `generate` return after its current token."""
        self.engine.pause("abort")

    def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """Expect the buckets of a plan; see `RolloutEngine.begin_weights`."""
        self.engine.pause("wait")
        self._is_loading = True
        self.engine.begin_weights(version, plan, transport)

    def load_bucket(self, handle: Any, checksum: int) -> None:
        """Copy the next bucket into the model; see `RolloutEngine.load_bucket`."""
        self.engine.load_bucket(handle, checksum)

    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """Put the loaded weights in use, and return what each receiver then has."""
        acknowledged = self.engine.commit_weights(version)
        self._is_loading = False
        return acknowledged

    def save_pretrained(self, folder: Path) -> str:
        """Write the current weights, the last copy where the trainer is gone; return their version and dtype.

        Raises:
            WeightsError: a sync was under way, so that they are of two versions.
            UnsupportedError: the engine cannot write its weights.
        """
        if self._is_loading:
            raise WeightsError("a weight sync was under way: the weights are of two versions")
        return f"version {self.engine.version}, {self.engine.save_pretrained(folder)}"
