"""A rollout engine whose model lives in two child processes: requests go to them in turn, weights to both."""

from __future__ import annotations

import itertools
import multiprocessing
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_async.rollout.interface import RolloutEngine, RolloutStats
from verl_engine.contract.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from verl_async.config import RolloutConfig
    from verl_async.rollout.interface import (
        Acknowledgement,
        Completion,
        GenerationRequest,
        PauseMode,
        WeightTransport,
    )
    from verl_engine.engine.weights.bucket import WeightBucket


def serve(connection: Any, config: Any, folder: Path) -> None:
    """Run an embedded engine; each call is answered, each completion sent."""
    import torch

    from verl_async.rollout.embedded import EmbeddedEngine

    torch.set_num_threads(1)
    engine, sending = EmbeddedEngine(config, folder), threading.Lock()

    def send(*message: Any) -> None:
        with sending:
            connection.send(message)

    def answer(number: int, name: str, arguments: Any) -> None:
        try:
            if name == "submit":
                engine.submit(arguments[0], lambda one: send(None, one), sealed=arguments[1])
                send(number, None)
            else:
                send(number, getattr(engine, name)(*arguments))
        except EngineError as error:
            send(number, error)

    while (message := connection.recv()) is not None:
        threading.Thread(target=answer, args=message).start()


class TwoProcessEngine(RolloutEngine):
    """As the embedded one, twice."""

    def __init__(self, config: RolloutConfig, model_folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.version = 0
        self._numbers = itertools.count()
        self._answers: dict[int, Future[Any]] = {}
        self._in_flight: dict[str, tuple[GenerationRequest, Callable[[Completion], None]]] = {}
        pairs = [context.Pipe() for _ in range(2)]
        self._connections = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=serve, args=(theirs, config, model_folder), daemon=True) for _, theirs in pairs
        ]
        for process in self.processes:
            process.start()
        for connection in self._connections:
            threading.Thread(target=self._listen, args=(connection,), daemon=True).start()

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        own = []
        for request in requests:
            name = str(next(self._numbers))
            self._in_flight[name] = (request, on_completion)
            own.append(replace(request, request_id=name))
        for connection, part in zip(self._connections, (own[::2], own[1::2]), strict=True):
            self._call(connection, "submit", part, sealed).result()

    def pause(self, mode: PauseMode) -> None:
        self._call_both("pause", mode)

    def resume(self) -> None:
        self._call_both("resume")

    def close(self) -> None:
        for connection, process in zip(self._connections, self.processes, strict=True):
            if process.is_alive():
                self._call(connection, "close").result()
                connection.send(None)
            process.join()

    def stats(self) -> RolloutStats:
        first, second = self._call_both("stats")
        return RolloutStats(*(getattr(first, name) + getattr(second, name) for name in RolloutStats.__slots__))

    def receivers(self) -> tuple[str, ...]:
        return ("first", "second")

    def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        self._call_both("begin_weights", version, plan, transport)

    def load_bucket(self, handle: Any, checksum: int) -> None:
        self._call_both("load_bucket", handle, checksum)

    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        found = self._call_both("commit_weights", version)
        self.version = version
        return {name: next(iter(one.values())) for name, one in zip(self.receivers(), found, strict=True)}

    def _call_both(self, name: str, *arguments: Any) -> list[Any]:
        calls = [self._call(connection, name, *arguments) for connection in self._connections]
        return [call.result() for call in calls]

    def _call(self, connection: Any, name: str, *arguments: Any) -> Future[Any]:
        number = next(self._numbers)
        found = self._answers[number] = Future()
        connection.send((number, name, arguments))
        return found

    def _listen(self, connection: Any) -> None:
        while True:
            try:
                number, found = connection.recv()
            except (EOFError, OSError):
                return
            if number is None:
                request, on_completion = self._in_flight[found.request.request_id]
                on_completion(replace(found, request=request))
            elif isinstance(found, EngineError):
                self._answers.pop(number).set_exception(found)
            else:
                self._answers.pop(number).set_result(found)
