"""The process that a user's reward function runs in: ``python -m verl_async.data.reward_server FD``."""

from __future__ import annotations

import io
import os
import sys
import threading
import traceback
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from verl_async.data.rewards import load_reward
from verl_async.errors import RewardError
from verl_engine.contract.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from verl_async.config import RewardConfig
    from verl_async.data.rewards import Reward


class _Server:
    """Answers over a pipe, for as long as the other side has it open."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def run(self) -> None:
        """Import the function, then score; each call in a thread."""
        number, (config, path) = self._connection.recv()
        sys.path[:] = path
        sys.argv[:] = [config.function]  # a module that reads them must not see ours
        reward = self._load(number, config)
        while reward is not None:
            number, question = self._connection.recv()
            threading.Thread(target=self._score, args=(reward, number, *question), daemon=True).start()

    def _load(self, number: int, config: RewardConfig) -> Reward | None:
        printed = io.StringIO()
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                reward = load_reward(config)
        except EngineError as error:
            last_words = printed.getvalue().strip().rpartition("\n")[2]
            said = f"; it printed: {last_words}" if last_words else ""
            self._answer(number, error=ConfigError(f"{error}{said}"), trace=traceback.format_exc())
            return None
        sys.stdout.write(printed.getvalue())
        module = sys.modules.get(getattr(reward.function, "__module__", ""))
        self._answer(number, getattr(module, "__file__", None) or config.function)
        return reward

    def _score(self, reward: Reward, number: int, *question: Any) -> None:
        try:
            self._answer(number, reward.score(*question))
        except RewardError as error:
            trace = traceback.format_exc() if error.__cause__ else ""
            self._answer(number, error=RewardError(str(error)), trace=trace)

    def _answer(self, number: int, result: object = None, *, error: EngineError | None = None, trace: str = "") -> None:
        with self._lock:
            self._connection.send((number, result, error, trace))


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
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # what the function starts must not hold the pipe open
    with suppress(EOFError, OSError):
        _Server(Connection(descriptor)).run()
    os._exit(0)


if __name__ == "__main__":
    main()
