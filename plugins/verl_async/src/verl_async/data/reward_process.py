"""A user's reward function in a process of its own: it may exit, crash or hang, and only its own call is lost."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from verl_async.data.reward_frames import HEADER, content, frame
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from verl_async.data.rewards import Result, Sample
    from verl_async.reward_config import RewardFunctionConfig

_START_S: Final = 600.0
"""For importing the function's module, which may load a model."""
_GRACE_S: Final = 5.0
"""How much longer than a call of an async function its process may take to end it."""
_EXIT_S: Final = 1.0
"""From the end of the connection to that of the process."""


class CallFailed(Exception):  # noqa: N818 - becomes a RewardError, which names the sample
    """A call failed; the text goes on a message that names the sample."""


class RewardTraceback(Exception):  # noqa: N818 - the cause of an error, not one itself
    """Where in the other process an error was raised."""


class ProcessLost(CallFailed):
    """The process of a call is gone."""

    def __init__(self, text: str, num_beside: int) -> None:
        """Keep how many other calls it had: any of them may be at fault."""
        super().__init__(text)
        self.num_beside = num_beside


class RewardProcess:
    """One process with the function."""

    def __init__(self, config: RewardFunctionConfig, at: str, timeout_s: float) -> None:
        """Take the function, the dotted path of its settings, and the time limit of a call."""
        self._config, self._at, self._timeout_s = config, at, timeout_s
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Result]] = {}
        self._receiving: asyncio.Task[None] | None = None
        self.is_usable = True
        """Whether it has not ended."""
        self.file = ""
        """Of the function."""
        self.is_async = False

    async def start(self) -> None:
        """Start it, and have it import the function.

        Raises:
            ConfigError: see `load_reward`; or the module ended the process, or took too long.
        """
        ours, theirs = socket.socketpair()
        # In a session of its own: Ctrl-C and a lost terminal are the job's to act on. It ends when the socket closes.
        self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - at once; this Python and a module of ours
            [sys.executable, "-P", "-m", "verl_async.data.reward_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        try:
            self._writer.write(frame((self._config, self._at, sys.path, self._timeout_s)))
            async with asyncio.timeout(_START_S):
                started, error, trace = await self._receive()
        except (asyncio.IncompleteReadError, OSError) as lost:  # TimeoutError is one
            what = f"it took longer than {_START_S:g} s" if isinstance(lost, TimeoutError) else await self._exit()
            await self.close()
            raise ConfigError(
                f"{self._at}.function={self._config.function}: its module cannot be imported: {what}; it must not end "
                "the process that imports it: put what it does as a script under `if __name__ == '__main__':`"
            ) from None
        except BaseException:
            await self.close()
            raise
        if started is None:
            await self.close()
            raise ConfigError(error) from RewardTraceback(trace)
        self.file, self.is_async = started
        self._receiving = asyncio.create_task(self._receive_all())

    async def score(self, sample: Sample) -> Result:
        """Have a sample scored.

        Raises:
            CallFailed: the function raised, or returned no score.
            ProcessLost: this call, or one beside it, hangs or ended the process.
        """
        number = next(self._numbers)
        call: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._calls[number] = call
        self._writer.write(frame((number, sample)))
        try:
            await asyncio.wait({call}, timeout=self._timeout_s + _GRACE_S * self.is_async)
        except asyncio.CancelledError:
            self._calls.pop(number, None)
            if not self.is_async:  # it would hold up the next one
                self._lose("was cancelled")
            raise
        if not call.done():
            self._lose(self._stuck)
        return call.result()

    async def close(self) -> None:
        """End it, and what it started."""
        self._lose("was closed")
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
        self._process.wait()

    @property
    def _stuck(self) -> str:
        return f"is stuck: no score after reward.timeout_s={self._timeout_s:g} seconds"

    def _lose(self, text: str) -> None:
        """End the process, and all calls that it has."""
        if not self.is_usable:
            return
        self.is_usable = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for call in self._calls.values():
            call.set_exception(ProcessLost(text, len(self._calls) - 1))
        self._calls = {}

    async def _receive_all(self) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            while True:
                number, result, text, trace = await self._receive()
                call = self._calls.pop(number, None)
                if call is None:  # it was cancelled
                    continue
                if result is not None:
                    call.set_result(result)
                    continue
                error = CallFailed(text or self._stuck)
                error.__cause__ = RewardTraceback(trace) if trace else None
                call.set_exception(error)
        if self.is_usable:
            self._lose(f"ended the process that scores: {await self._exit()}")

    async def _receive(self) -> Any:
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        return content(await self._reader.readexactly(length))

    async def _exit(self) -> str:
        """Say how the process ended."""
        for _ in range(100):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(_EXIT_S / 100)
        else:
            return "it closed its connection"
        code = self._process.returncode
        return f"it ended with signal {-code}" if code < 0 else f"it ended with exit status {code}"
