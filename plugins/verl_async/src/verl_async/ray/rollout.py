"""Rollout engines as Ray actors."""

from __future__ import annotations

import asyncio
import gc
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import ray

from verl_async.orchestrator.waiting import end
from verl_async.ray.answers import answer
from verl_async.rollout.interface import Completion
from verl_async.rollout.kind import ROLLOUT
from verl_engine.contract.errors import WeightsError
from verl_engine.host.loading import load_plugin

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from verl_async.config import RolloutConfig
    from verl_async.orchestrator.actors import BucketDelivery
    from verl_async.rollout.interface import (
        Acknowledgement,
        Generation,
        GenerationRequest,
        PauseMode,
        RolloutEngine,
        RolloutStats,
        WeightTransport,
    )
    from verl_async.rollout.spec import RolloutSpec
    from verl_engine.contract.errors import EngineError
    from verl_engine.engine.weights.bucket import WeightBucket


_CONTROL: Final = "control"
"""The concurrency group of calls that must be heard however many requests are on their way."""
_CONTROL_CALLS: Final = 8
"""Of them at once: pauses that wait must not keep others from being heard."""
_MOST_AT_ONCE: Final = 128
"""Completions that travel together: the driver hears other answers, such as that of a pause, between two lots."""


class RolloutActor:
    """One rollout process. Asynchronous, so that it hears other calls while the engine works in its own thread."""

    def __init__(self, config: RolloutConfig, model_folder: Path) -> None:
        """Remember what to load."""
        self._config = config
        self._model_folder = model_folder
        self._done: SimpleQueue[Completion] = SimpleQueue()
        self._is_loading = False

    async def start(self) -> str:
        """Load the engine by name and its model; return this node's id."""
        self._engine = await asyncio.to_thread(self._load)
        gc.freeze()  # what is there by now stays; see `verl_async.ray.cluster`
        return str(ray.get_runtime_context().get_node_id())

    def _load(self) -> RolloutEngine:
        spec: RolloutSpec = load_plugin(ROLLOUT, self._config.backend, "rollout.backend").spec
        engine: RolloutEngine = spec.load_engine()(self._config, self._model_folder)
        return engine

    async def submit(self, requests: list[GenerationRequest], sealed: bool) -> None:
        """See `RolloutEngine.submit`; `collect` gives what comes of them."""
        self._engine.submit(requests, self._done.put, sealed=sealed)

    async def collect(self) -> list[tuple[str, int, Generation, EngineError | None]]:
        """Wait for a completion, and return what there is: the request's id in place of the request."""
        found = [await asyncio.to_thread(self._done.get)]
        while not self._done.empty() and len(found) < _MOST_AT_ONCE:
            found.append(self._done.get())
        return [(one.request.request_id, one.index, one.generation, one.error) for one in found]

    @ray.method(concurrency_group=_CONTROL)
    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await asyncio.to_thread(self._engine.pause, mode)

    @ray.method(concurrency_group=_CONTROL)
    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        self._engine.resume()

    @ray.method(concurrency_group=_CONTROL)
    async def stats(self) -> RolloutStats:
        """See `RolloutEngine.stats`."""
        return self._engine.stats()

    @ray.method(concurrency_group=_CONTROL)
    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        await asyncio.to_thread(self._engine.close)

    async def begin_weights(self, version: int, plan: list[WeightBucket], transport: WeightTransport) -> None:
        """See `RolloutEngine.begin_weights`."""
        self._is_loading = True
        await asyncio.to_thread(self._engine.begin_weights, version, plan, transport)

    async def load_bucket(self, handle: Any, checksum: int) -> None:
        """See `RolloutEngine.load_bucket`; in place of a reference, Ray hands over the bytes."""
        await asyncio.to_thread(self._engine.load_bucket, handle, checksum)

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """See `RolloutEngine.commit_weights`."""
        acknowledged = await asyncio.to_thread(self._engine.commit_weights, version)
        self._is_loading = False
        return acknowledged

    async def save_pretrained(self, folder: Path) -> str:
        """Write the current weights, the last copy where the trainer is gone; return their version and dtype.

        Raises:
            WeightsError: a sync was under way, so that they are of two versions.
            UnsupportedError: the engine cannot write its weights.
        """
        if self._is_loading:
            raise WeightsError("a weight sync was under way: the weights are of two versions")
        dtype = await asyncio.to_thread(self._engine.save_pretrained, folder)
        return f"version {self._engine.version}, {dtype}"


class RayRolloutClient:
    """A `RolloutClient` of an actor."""

    def __init__(self, index: int, config: RolloutConfig, model_folder: Path, options: dict[str, Any]) -> None:
        """Start the actor; `start` waits for it."""
        self.name = f"rollouter-{index}"
        self.node_id = ""
        # Ray's types do not know the groups, and its `options` does not take them.
        actor: Any = ray.remote(concurrency_groups={_CONTROL: _CONTROL_CALLS})(RolloutActor)  # type: ignore[call-overload]
        self.actor: Any = actor.options(**options).remote(config, model_folder)
        self._in_flight: dict[str, tuple[GenerationRequest, Callable[[Completion], None], int]] = {}
        """By request id: the request, who wants its samples, and how many are to come."""
        self._outbox: list[tuple[list[GenerationRequest], bool]] = []
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()

    async def start(self) -> None:
        """Load the model."""
        self.node_id = await answer(self.actor.start.remote(), self.name)

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        """See `RolloutClient.submit`; one turn of the event loop makes one call, and one for each sealed batch."""
        for request in requests:
            assert request.request_id not in self._in_flight, f"{request.request_id!r} is in flight already"
            self._in_flight[request.request_id] = (request, on_completion, len(request.seeds))
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append((list(requests), sealed))

    async def serve(self) -> None:
        """See `RolloutClient.serve`."""
        failing = asyncio.ensure_future(self._failures.get())
        collecting = asyncio.ensure_future(answer(self.actor.collect.remote(), self.name))
        try:
            while True:
                await asyncio.wait({failing, collecting}, return_when=asyncio.FIRST_COMPLETED)
                if failing.done():
                    raise failing.result()
                found = collecting.result()
                collecting = asyncio.ensure_future(answer(self.actor.collect.remote(), self.name))
                for request_id, index, generation, error in found:
                    self._deliver(request_id, index, generation, error)
        finally:
            await end(failing, collecting)

    def _deliver(self, request_id: str, index: int, generation: Generation, error: EngineError | None) -> None:
        request, on_completion, left = self._in_flight.pop(request_id)
        if left > 1:
            self._in_flight[request_id] = (request, on_completion, left - 1)
        on_completion(Completion(request, index, generation, error))

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        batches = [(requests, True) for requests, sealed in outbox if sealed]
        free = [request for requests, sealed in outbox if not sealed for request in requests]
        for requests, sealed in [*batches, (free, False)]:
            if requests:
                sending = asyncio.ensure_future(answer(self.actor.submit.remote(requests, sealed), self.name))
                sending.add_done_callback(self._note_failure)

    def _note_failure(self, sending: asyncio.Future[None]) -> None:
        if not sending.cancelled() and (error := sending.exception()) is not None:
            self._failures.put_nowait(error)

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`; heard within one token, however many requests wait."""
        await answer(self.actor.pause.remote(mode), self.name)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await answer(self.actor.resume.remote(), self.name)

    async def stats(self) -> RolloutStats:
        """See `RolloutEngine.stats`."""
        stats: RolloutStats = await answer(self.actor.stats.remote(), self.name)
        return stats

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        await answer(self.actor.close.remote(), self.name)

    async def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """Expect the buckets of a plan."""
        await answer(self.actor.begin_weights.remote(version, plan, transport), self.name)

    async def load_bucket(self, delivery: BucketDelivery) -> None:
        """Check the next bucket and copy it into the model."""
        await answer(self.actor.load_bucket.remote(delivery.handle, delivery.checksum), self.name)

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """Put the loaded weights in use."""
        acknowledged: Mapping[str, Acknowledgement] = await answer(self.actor.commit_weights.remote(version), self.name)
        return acknowledged

    async def save_pretrained(self, folder: Path) -> str:
        """Write the current weights as a Hugging Face folder."""
        about: str = await answer(self.actor.save_pretrained.remote(folder), self.name)
        return about
