"""A user's reward function in a process of its own: it may exit, crash or hang, and the job still saves its model."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import weakref
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any, Final

from verl_async.data.rewards import Reward, exact_match, load_reward
from verl_async.errors import RewardError
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from verl_async.config import RewardConfig
    from verl_async.data.prompts import Prompt

_START_S: Final = 600.0
"""For importing the function's module, which may load a model."""
_GRACE_S: Final = 5.0
"""How much longer than a call its process may take to say that the call is stuck."""


def open_reward(config: RewardConfig) -> Reward | RewardProcess:
    """Find the reward function that a job names; a user's runs in a process of its own.

    Raises:
        ConfigError: it cannot be imported, is no function, takes other arguments than verl's, or ended its process.
    """
    return load_reward(config) if config.function == "exact_match" else RewardProcess(config)


class RewardProcess:
    """As `Reward`, in another process, which ends when this is no longer used. Calls run beside each other there."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the process, and have it import the function; see `open_reward`."""
        self._name, self._timeout_s = config.function, config.timeout_s
        self._link = _Link()
        weakref.finalize(self, self._link.end)
        self._file = ""
        try:
            self._file = self._link.ask((config, sys.path)).result(_START_S)
        except (EOFError, FutureTimeoutError) as error:
            what = str(error) or f"it took longer than {_START_S:g} s"
            raise ConfigError(
                f"reward.function={self._name}: its module cannot be imported: {what}; it must not end the process "
                "that imports it: put what it does as a script under `if __name__ == '__main__':`"
            ) from None

    def score(self, prompt: Prompt, solution: str, sample_id: str) -> float:
        """Score one answer; see `Reward.score`.

        Raises:
            RewardError: as there, or the function ended its process.
        """
        call = self._link.ask((prompt, solution, sample_id))
        where = f"reward.function={self._name} ({self._file}): sample {sample_id} (prompt row {prompt.index})"
        try:
            return float(call.result(self._timeout_s + _GRACE_S))
        except FutureTimeoutError:
            raise RewardError(f"{where} is stuck, and its process does not answer; fix the function") from None
        except EOFError as error:
            raise RewardError(
                f"{where} or one beside it ended the process that scores: {error}; a reward function must return a "
                "score or raise an exception"
            ) from None

    def is_exact(self, prompt: Prompt, solution: str) -> bool:
        """Tell whether an answer is the ground truth, whatever the reward function is."""
        return exact_match(prompt.data_source, solution, prompt.ground_truth, prompt.extra_info) == 1.0


class RewardTraceback(Exception):  # noqa: N818 - the cause of an error, not one itself
    """Where in the other process an error was raised."""


class _Link:
    """The process, and the questions it has not answered."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        # In a session of its own: Ctrl-C and a lost terminal are the job's to act on. It ends when the pipe is closed.
        self._process = subprocess.Popen(  # noqa: S603 - this Python and a module of ours
            [sys.executable, "-P", "-m", "verl_async.data.reward_server", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._ended: EOFError | None = None
        threading.Thread(target=self._receive, name="rewards", daemon=True).start()

    def ask(self, question: object) -> Future[Any]:
        """Send a question; the answer may be an EOFError that says how the process ended."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._ended is not None:
                answer.set_exception(self._ended)
                return answer
            number = next(self._numbers)
            self._calls[number] = answer
            with suppress(OSError):  # it has just ended, as `_receive` will find
                self._connection.send((number, question))
        return answer

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _receive(self) -> None:
        connection: Connection = self._connection
        with suppress(EOFError, OSError):
            while True:
                number, result, error, trace = connection.recv()
                answer = self._calls.pop(number)
                if error is None:
                    answer.set_result(result)
                else:
                    error.__cause__ = RewardTraceback(trace) if trace else None
                    answer.set_exception(error)
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        with self._lock:
            self._ended = EOFError(f"it ended with {how}")
            unanswered, self._calls = self._calls, {}
        for answer in unanswered.values():
            answer.set_exception(self._ended)
        connection.close()
