"""The process that a user's reward function runs in: ``python -m verl_async.data.reward_server FD``."""

from __future__ import annotations

import asyncio
import io
import os
import queue
import socket
import sys
import threading
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from verl_async.data.reward_frames import HEADER, content, frame
from verl_async.data.rewards import Result, is_async, load_reward, read_result
from verl_async.data.rows import shorten
from verl_engine.contract.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_async.data.rewards import Sample


class _Server:
    """Scores what comes over a socket, for as long as the other side has it open."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")

    def run(self) -> None:
        """Import the function, then score: in this thread, as functions may use signals."""
        config, at, path, timeout_s = self._receive()
        sys.path[:] = path
        sys.argv[:] = [config.function]  # a module that reads them must not see ours
        printed = io.StringIO()
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                function = load_reward(config, at)
        except EngineError as error:
            last_words = printed.getvalue().strip().rpartition("\n")[2]
            said = f"; it printed: {last_words}" if last_words else ""
            self._send((None, f"{error}{said}", traceback.format_exc()))
            return
        sys.stdout.write(printed.getvalue())
        owner = function if hasattr(function, "__module__") else type(function)
        file = getattr(sys.modules.get(owner.__module__), "__file__", None) or config.function
        self._send(((file, is_async(function)), "", ""))
        if is_async(function):
            asyncio.run(self._await_all(function, timeout_s))
        else:
            self._call_each(function)

    def _call_each(self, function: Callable[..., object]) -> None:
        samples: queue.SimpleQueue[tuple[int, Sample]] = queue.SimpleQueue()
        self._read_into(samples.put)
        while True:
            number, sample = samples.get()
            try:
                value = function(**sample.arguments)
            except BaseException as error:  # noqa: BLE001 - what it raises is the result
                self._send_error(number, sample, error)
            else:
                self._send_value(number, sample, value)

    async def _await_all(self, function: Callable[..., Any], timeout_s: float) -> None:
        samples: asyncio.Queue[tuple[int, Sample]] = asyncio.Queue()
        loop, calls = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        self._read_into(lambda item: loop.call_soon_threadsafe(samples.put_nowait, item))

        async def call(number: int, sample: Sample) -> None:
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    value = await function(**sample.arguments)
            except BaseException as error:  # noqa: BLE001 - what it raises is the result
                if isinstance(error, TimeoutError) and limit.expired():
                    self._send((number, None, "", ""))
                else:
                    self._send_error(number, sample, error)
            else:
                self._send_value(number, sample, value)

        while True:
            task = asyncio.create_task(call(*await samples.get()))
            calls.add(task)
            task.add_done_callback(calls.discard)

    def _read_into(self, put: Callable[[Any], object]) -> None:
        """Read in a thread, which ends the process when the other side is gone, whatever the function does."""

        def read() -> None:
            with suppress(EOFError, OSError):
                while True:
                    put(self._receive())
            os._exit(0)

        threading.Thread(target=read, name="samples", daemon=True).start()

    def _send_value(self, number: int, sample: Sample, value: object) -> None:
        try:
            result: Result = read_result(value)
        except ValueError as error:
            self._send((number, None, str(error), ""))
        except Exception as error:  # noqa: BLE001 - a number of a class of its own may raise anything
            self._send_error(number, sample, error)
        else:
            self._send((number, result, "", ""))

    def _send_error(self, number: int, sample: Sample, error: BaseException) -> None:
        text = f"raised {type(error).__name__}: {error}; for the answer {shorten(sample.solution)}"
        self._send((number, None, text, "".join(traceback.format_exception(error))))

    def _receive(self) -> Any:
        header = self._stream.read(HEADER.size)
        if len(header) < HEADER.size:
            raise EOFError
        return content(self._stream.read(*HEADER.unpack(header)))

    def _send(self, value: object) -> None:
        self._stream.write(frame(value))
        self._stream.flush()


class _Forgiving(io.TextIOBase):
    """What a function prints goes where the job's does; where nobody reads that, the function must not fail."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # a stream closed at the start is None
            self._stream.write(text)
            self._stream.flush()
        return len(text)


def main() -> None:
    """Serve until the job ends, then end at once, whatever still runs."""
    sys.stdout, sys.stderr = _Forgiving(sys.stdout), _Forgiving(sys.stderr)
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)  # what the function starts must not hold the socket open
    with suppress(EOFError, OSError):
        _Server(connection).run()
    os._exit(0)


if __name__ == "__main__":
    main()
