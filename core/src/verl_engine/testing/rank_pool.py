"""Processes of this machine that share a process group and stay for many calls: starting them takes the time."""

import contextlib
import datetime
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final, TypeVar

from verl_engine.testing.rank_state import RankState

Result = TypeVar("Result")

PRELOADED: Final = [
    "torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint.state_dict",
    "transformers", "transformers.models.qwen3.modeling_qwen3", "verl_engine.testing.conformance.bench",
]  # fmt: skip
"""Imported once, by the server of which each rank is a fork; several times faster than a fresh start of each. What is
added before the first rank starts, such as an engine's module, comes too."""
_GRACE_S: Final = 2.0
"""How long the other ranks may still report after a first failure: theirs may have come earlier."""
_LOG_LINES: Final = 40
_TIDY: Final = ()
"""Sent when all ranks have returned from a call: a group that one ended earlier might fail in its peer."""


class RankError(AssertionError):
    """A rank failed; the message holds the earliest failure, since the others often only say that a peer was gone."""

    def __init__(self, message: str, summary: str, details: str) -> None:
        super().__init__(message)
        self.summary = summary
        """The failure in a line or two, without its traceback."""
        self.details = details
        """Its traceback; of ranks that did not respond, where each of them is."""


@dataclass(frozen=True, slots=True)
class _Failure:
    when: float
    rank: int
    summary: str
    text: str


class RankPool:
    """A world of ranks. After a failure it is closed, since the others may wait for the rank that failed."""

    def __init__(
        self,
        world_size: int,
        *,
        prepare: Callable[[], None] | None = None,
        device: str = "cpu",
        must_precede: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        tidy: Callable[[], None] | None = None,
    ) -> None:
        """Start the ranks; they are not waited for.

        Args:
            world_size: number of processes, each with one CPU thread.
            prepare: called in each before torch is imported there; module-level and picklable.
            device: kind of device whose collectives are used.
            must_precede: modules that may not be imported before `prepare`; then nothing is preloaded that would.
            environment: variables that each gets before `prepare`.
            tidy: called in each when all of them have returned from a call; such as `end_groups`.
        """
        self.world_size = world_size
        self.is_closed = False
        self.is_worn = False
        """Whether a call left behind what cannot be put back, such as an ended process group: start others."""
        is_in_the_way = any(f"{name}.".startswith(f"{root}.") for name in PRELOADED for root in must_precede)
        context: Any = multiprocessing.get_context("spawn" if is_in_the_way else "forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._folder = tempfile.TemporaryDirectory(prefix="verl-engine-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world_size, self._folder.name, there, environment or {}, prepare, tidy, device),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Result], *args: object, timeout_s: float = 120.0) -> list[Result]:
        """Call ``function(rank, *args)`` on every rank, and return their results in rank order.

        The function is module-level and picklable, as its arguments and result must be. A RankError where a rank
        raised, died or did not respond within `timeout_s`; the pool is closed then.
        """
        # Plain pickle copies tensors; multiprocessing's own would share them with a process that is about to end.
        self._send((function, args))
        results, failures = self._collect(time.monotonic() + timeout_s)
        if failures:
            self.close(grace_s=0.0)  # some may wait for each other forever
            first = min(failures, key=lambda failure: (failure.when, failure.rank))
            raise RankError(
                f"rank {first.rank} of {self.world_size} failed first:\n{first.text}",
                f"rank {first.rank} of {self.world_size}: {first.summary}",
                first.text,
            )
        silent = [rank for rank in range(self.world_size) if rank not in results]
        if silent:
            who = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
            summary = f"no result from {who} of {self.world_size} within {timeout_s:g} s"
            places = self._places(silent)
            self.close(grace_s=0.0)  # some may wait for each other forever
            raise RankError(summary, summary, f"{summary}\n{places}")
        self._send(_TIDY)
        return [results[rank] for rank in range(self.world_size)]

    def close(self, grace_s: float = 2.0) -> None:
        """End the ranks, killing those that do not end by themselves in time. Harmless when called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        self._send(None)
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()

    def _send(self, job: object) -> None:
        message = pickle.dumps(job)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # that a rank died is said where its result is waited for
                pipe.send_bytes(message)

    def _collect(self, deadline: float) -> tuple[dict[int, Any], list[_Failure]]:
        waiting = dict(enumerate(self._pipes))
        results: dict[int, Any] = {}
        failures: list[_Failure] = []
        while waiting and time.monotonic() < deadline:
            wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            for rank, pipe in list(waiting.items()):
                if not pipe.poll():
                    continue
                del waiting[rank]
                reply = self._receive(rank)
                if isinstance(reply, _Failure):
                    failures.append(reply)
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
                else:
                    results[rank], is_worn = reply
                    self.is_worn |= is_worn
        return results, failures

    def _receive(self, rank: int) -> tuple[Any, bool] | _Failure:
        try:
            reply: tuple[Any, bool] | _Failure = pickle.loads(self._pipes[rank].recv_bytes())  # noqa: S301 - our own child
        except (EOFError, OSError):
            self._processes[rank].join(_GRACE_S)
            summary = f"the process died without a result (exit code {self._processes[rank].exitcode})"
            # Before all others: that their peer is gone they may have noticed sooner than we.
            return _Failure(-math.inf, rank, summary, f"{summary}; it wrote:\n{self._log(rank)}")
        return reply

    def _places(self, silent: list[int]) -> str:
        for rank in silent:
            process = self._processes[rank]
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)  # makes it write its stack into its log
        time.sleep(0.3)
        return "\n".join(f"rank {rank} is at:\n{self._log(rank)}" for rank in silent)

    def _log(self, rank: int) -> str:
        try:
            lines = _log_file(self._folder.name, rank).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return "(nothing)"
        return "\n".join(lines[-_LOG_LINES:]) or "(nothing)"


def _log_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.log"


def _serve(
    rank: int,
    world_size: int,
    folder: str,
    pipe: Connection,
    environment: Mapping[str, str],
    prepare: Callable[[], None] | None,
    tidy: Callable[[], None] | None,
    device: str,
) -> None:
    os.environ.update(
        environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo"
    )
    log = os.open(_log_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)  # what ranks print is shown when they fail; elsewhere it would spoil the caller's output
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=False)
    faulthandler.enable(log)
    start: RankState | _Failure
    try:
        if prepare is not None:
            prepare()
        _join_group(rank, world_size, folder, device)
        gc.freeze()  # what is imported stays; without it each collection would look through all of it
        gc.set_threshold(100_000)  # each call ends with a collection anyway
        start = RankState.take()
    except BaseException as error:  # noqa: BLE001 - also a SystemExit must reach the parent
        start = _describe(rank, error)
    while True:
        try:
            job: tuple[Any, ...] | None
            job = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from our own parent
        except EOFError:  # the parent is gone
            break
        except Exception as error:  # noqa: BLE001 - importing what is to be called can fail in any way
            pipe.send_bytes(pickle.dumps(_describe(rank, error)))
            continue
        if job is None:
            break
        if isinstance(start, _Failure):
            pipe.send_bytes(pickle.dumps(start))
        elif job != _TIDY:
            pipe.send_bytes(_reply_to(rank, start, *job))
        elif tidy is not None:
            try:
                tidy()
            except BaseException as error:  # noqa: BLE001 - the next call says it
                start = _describe(rank, error)
    _leave_group()


def _join_group(rank: int, world_size: int, folder: str, device: str) -> None:
    import torch
    import torch.distributed as dist

    from verl_engine.engine.device import Device

    torch.set_num_threads(1)
    found = Device.resolve(device, rank)
    found.activate()
    dist.init_process_group(
        found.collectives,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(hours=1),  # who calls sets the time limits
    )


def _reply_to(rank: int, start: RankState, function: Callable[..., Any], args: tuple[object, ...]) -> bytes:
    start.restore()
    try:
        result = function(rank, *args)
        return pickle.dumps((result, start.is_worn()))
    except BaseException as error:  # noqa: BLE001 - also a SystemExit must reach the parent
        return pickle.dumps(_describe(rank, error))
    finally:
        gc.collect()  # what one call built is gone before the next


def _describe(rank: int, error: BaseException) -> _Failure:
    place = traceback.extract_tb(error.__traceback__)[-1]
    kind = "" if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: "
    where = "" if not kind else f" ({Path(place.filename).name}:{place.lineno})"
    text = "".join(traceback.format_exception(error))
    return _Failure(time.monotonic(), rank, f"{kind}{error}{where}", text)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
