"""A rollout worker as the job uses it: requests in, samples out, and an error that names it where none come."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from verl_async.orchestrator.timeline import Activity
from verl_async.orchestrator.waiting import together
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.orchestrator.actors import RolloutClient
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.rollout.interface import Completion, Generation, GenerationRequest, PauseMode


class RolloutWorker:
    """Knows what is in flight at its engine. Runs in one event loop; `serve` must run beside the other calls."""

    def __init__(self, client: RolloutClient, timeline: Timeline, timeout_s: float) -> None:
        """Take a started worker.

        Args:
            client: of the worker.
            timeline: told when it generates, and when it waits.
            timeout_s: how long it may finish nothing, though it has samples to generate.
        """
        self.client = client
        self.name = client.name
        self.num_started = 0
        """Samples of the training prompts that were given to it and are not generated yet; the dispatcher counts."""
        self._in_flight: dict[str, asyncio.Future[Generation]] = {}
        self._num_sent = 0
        self._is_paused = False
        self._timeout_s = timeout_s
        self._moved_s = time.monotonic()
        """When it finished something last, or was given something to do."""
        self._activity = Activity(timeline, client.name, "wait for trainer")

    async def serve(self) -> None:
        """Hand out what is generated, until cancelled.

        Raises:
            EngineError: a request was refused, or the worker failed or is gone.
            StuckError: it finished nothing for too long.
        """
        await together(self.client.serve(), self._watch())

    async def generate(self, request: GenerationRequest) -> Generation:
        """Generate the one sample of a request; where a weight sync stops it, go on with the tokens there are."""
        while True:
            [sent] = self.send([request])
            generation = await sent
            if generation.finish_reason != "interrupted":
                return generation
            request = replace(request, so_far=(generation,))

    def send(self, requests: Sequence[GenerationRequest], *, sealed: bool = False) -> list[asyncio.Future[Generation]]:
        """Send requests of one sample each, and return what will have the samples, finished or interrupted.

        Args:
            requests: all that are sent in one turn of the event loop travel together.
            sealed: whether they run whole and in order, with nothing beside them.
        """
        if not self._in_flight:
            self._moved_s = time.monotonic()
        sent: dict[str, asyncio.Future[Generation]] = {}
        named = []
        for request in requests:
            assert len(request.seeds) == 1
            named.append(replace(request, request_id=str(self._num_sent)))
            sent[str(self._num_sent)] = asyncio.get_running_loop().create_future()
            self._num_sent += 1
        self._in_flight |= sent
        self._note_activity()
        self.client.submit(named, self._take, sealed=sealed)
        return list(sent.values())

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await self.client.pause(mode)
        self._is_paused = True
        self._note_activity()

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await self.client.resume()
        self._is_paused = False
        self._moved_s = time.monotonic()
        self._note_activity()

    def _take(self, completion: Completion) -> None:
        self._moved_s = time.monotonic()
        future = self._in_flight.pop(completion.request.request_id)
        self._note_activity()
        if future.done():
            return  # cancelled: nobody wants it any more
        if completion.error is not None:
            future.set_exception(completion.error)
        else:
            future.set_result(completion.generation)

    def _note_activity(self) -> None:
        self._activity.is_now("generate" if self._in_flight and not self._is_paused else "wait for trainer")

    async def _watch(self) -> None:
        while True:
            left_s = self._moved_s + self._timeout_s - time.monotonic()
            if left_s <= 0 and self._in_flight and not self._is_paused:
                raise StuckError(
                    f"{self.name} did not finish generating any of {len(self._in_flight)} samples within "
                    f"{self._timeout_s:g} s"
                )
            await asyncio.sleep(left_s if left_s > 0 else self._timeout_s)
