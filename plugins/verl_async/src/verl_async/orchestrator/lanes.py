"""How the requests of one sample come to a worker: at once, or in step with the other samples of a sealed batch."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_async.orchestrator.rollout_worker import RolloutWorker
    from verl_async.rollout.interface import Generation, GenerationRequest


class Lane(Protocol):
    """One sample's way to its worker."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate the one sample of a request to its end."""

    def close(self) -> None:
        """Note that the sample needs no more; once."""


@dataclass(frozen=True, slots=True)
class StreamLane:
    """Sends each request at once."""

    worker: RolloutWorker
    close: Callable[[], None] = lambda: None

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `RolloutWorker.generate`."""
        return await self.worker.generate(request)


class SealedBatch:
    """Deterministic mode: holds requests back until each open lane has one, and sends them sealed, in the lanes' order.

    What a request is answered then depends on its batch alone, not on who came first or what ran beside.
    """

    def __init__(self, worker: RolloutWorker) -> None:
        """Start without lanes; all are opened before the first is used."""
        self._worker = worker
        self._open: dict[SealedLane, tuple[GenerationRequest, asyncio.Future[Generation]] | None] = {}

    def lane(self) -> SealedLane:
        """Open the lane of the next sample."""
        lane = SealedLane(self)
        self._open[lane] = None
        return lane

    async def generate(self, lane: SealedLane, request: GenerationRequest) -> Generation:
        """Generate together with the others."""
        assert self._open[lane] is None, "in deterministic mode a sample has one request at a time"
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        # What a worker has kept of a conversation depends on what ran before.
        self._open[lane] = (replace(request, affinity_key=""), future)
        self._send_if_complete()
        generation = await future
        assert generation.finish_reason != "interrupted", "on-policy no weight sync comes in between"
        return generation

    def close(self, lane: SealedLane) -> None:
        """Wait for that sample no more."""
        del self._open[lane]
        self._send_if_complete()

    def _send_if_complete(self) -> None:
        waiting = [one for one in self._open.values() if one is not None]
        if not waiting or len(waiting) < len(self._open):
            return
        self._open = dict.fromkeys(self._open)
        sent = self._worker.send([request for request, _ in waiting], sealed=True)
        for (_, future), done in zip(waiting, sent, strict=True):
            done.add_done_callback(partial(_pass_on, future))


class SealedLane:
    """One sample of a `SealedBatch`."""

    def __init__(self, batch: SealedBatch) -> None:
        """Belong to a batch; see `SealedBatch.lane`."""
        self._batch = batch

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate when all open lanes of the batch have a request."""
        return await self._batch.generate(self, request)

    def close(self) -> None:
        """Leave the batch."""
        self._batch.close(self)


def _pass_on(future: asyncio.Future[Generation], done: asyncio.Future[Generation]) -> None:
    if future.done():
        return  # cancelled: nobody wants it any more
    if (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())
