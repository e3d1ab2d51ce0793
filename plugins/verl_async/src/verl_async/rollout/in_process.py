"""A rollout engine used from the same process, call by call: for checks, tests and small loops of one's own."""

from __future__ import annotations

import zlib
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from verl_engine.engine.weights.bucket import BucketEntry, WeightBucket

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np
    import numpy.typing as npt

    from verl_async.rollout.interface import (
        Acknowledgement,
        Completion,
        Generation,
        GenerationRequest,
        RolloutEngine,
    )


class InlineTransport:
    """Handles are the bytes themselves."""

    def open(self) -> None:
        """Nothing to open."""

    def read(self, handle: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the handle; torch takes no read-only memory."""
        return handle if handle.flags.writeable else handle.copy()


def generate(engine: RolloutEngine, requests: Sequence[GenerationRequest], *, sealed: bool = False) -> list[Generation]:
    """Submit requests and wait for all their samples, finished or interrupted.

    Returns:
        The samples in order, those of the first request first.
    Raises:
        EngineError: as `RolloutEngine.submit`, or what the engine died of.
    """
    done: SimpleQueue[Completion] = SimpleQueue()
    engine.submit([replace(one, request_id=str(place)) for place, one in enumerate(requests)], done.put, sealed=sealed)
    found: dict[tuple[int, int], Generation] = {}
    for _ in range(sum(len(request.seeds) for request in requests)):
        completion = done.get()
        if completion.error is not None:
            raise completion.error
        found[int(completion.request.request_id), completion.index] = completion.generation
    return [found[key] for key in sorted(found)]


def send_weights(
    engine: RolloutEngine, weights: Iterable[tuple[str, torch.Tensor]], version: int
) -> Mapping[str, Acknowledgement]:
    """Pause an engine, give it all weights, a bucket for each, and go on.

    Args:
        engine: idle; what it generates is waited for.
        weights: full tensors in Hugging Face names.
        version: that they get.
    Returns:
        What each receiver then has.
    Raises:
        WeightsError: as `RolloutEngine.begin_weights` and the calls after it.
    """
    buckets = [as_bucket(name, weight) for name, weight in weights]
    engine.pause("wait")
    engine.begin_weights(version, [bucket for bucket, _ in buckets], InlineTransport())
    for _, content in buckets:
        engine.load_bucket(content, zlib.crc32(content.data))
    acknowledged = engine.commit_weights(version)
    engine.resume()
    return acknowledged


def as_bucket(name: str, weight: torch.Tensor) -> tuple[WeightBucket, Any]:
    """Lay one tensor into a bucket of its own; returns the bucket and its bytes."""
    content = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
    entry = BucketEntry(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."), 0)
    return WeightBucket((entry,), content.size), content
