"""The Ray cluster of a job: one of its own, or one that runs already."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import ray

from verl_async.orchestrator.waiting import end
from verl_async.ray.answers import ActorError, shortened
from verl_async.ray.local_cluster import LocalCluster, token_in
from verl_async.termination import signals_as_interrupt
from verl_engine.contract.errors import ConfigError, StuckError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

    from verl_async.config import RayConfig

T = TypeVar("T")

_QUIET: Final[dict[str, Any]] = {"logging_level": logging.ERROR, "log_to_driver": False}
"""Neither Ray's own messages nor what the processes print goes between the lines of our progress."""

_KNOCK_S: Final = 10.0
_LOOK_S: Final = 0.5
"""How often to look whether Ray's own processes live, on this machine."""
_CALL_S: Final = 5.0
"""How often to knock at a cluster of elsewhere."""
_SILENT_S: Final = 20.0
"""A cluster that does not open its door for so long is dead; after a minute Ray would end this process."""


class ClusterDiedError(ActorError):
    """Ray itself does not go on; its actors still answer for a while."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running cluster."""

    local: LocalCluster | None
    """None where it was not started for this job."""
    address: str = ""
    """Where its head listens, host:port, if it was not."""

    async def alive_during(self, work: Awaitable[T]) -> T:
        """Await something for as long as Ray lives.

        Raises:
            ClusterDiedError: a process of Ray ended, or its head does not answer any more; the work is cancelled.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else watch.result()
        except ActorError as error:
            # Actors that end with their cluster may be noticed first.
            if self.local is None and not isinstance(error, ClusterDiedError) and not await _is_open(self.address):
                raise self._silence() from error
            raise
        finally:
            await end(task, watch)

    def _silence(self) -> ClusterDiedError:
        return ClusterDiedError(
            f"the Ray cluster at {self.address} does not answer any more, without which the job cannot go on"
        )

    async def _watch(self) -> NoReturn:
        """Look whether Ray lives, until it does not."""
        heard = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S if self.local is not None else _CALL_S)
            if self.local is None:
                if await _is_open(self.address):
                    heard = time.monotonic()
                elif time.monotonic() - heard >= _SILENT_S:
                    raise self._silence()
            elif dead := self.local.dead_process():
                raise ClusterDiedError(
                    f"Ray's own process {dead} ended, without which the job cannot go on. If the machine ran out of "
                    "memory, lower trainer.max_tokens_per_micro_batch or rollout.max_batch_prompts"
                )


@contextmanager
def ray_cluster(config: RayConfig, num_actors: int, token: Path) -> Iterator[Cluster]:
    """Connect to the cluster, or start one on this machine; on leaving, all that was started is ended.

    Args:
        config: the ``ray`` section.
        num_actors: how many the job starts: a cluster of its own has a CPU slot for each, whatever the machine has.
        token: a new file, for the token by which the processes of a cluster of its own know each other.
    Raises:
        ConfigError: the address does not answer, or Ray does not start here.
    """
    with ExitStack() as stack:
        thread = stack.enter_context(ThreadPoolExecutor(1, "ray"))
        if config.address is None:
            stack.enter_context(token_in(token))
        logs = ""
        try:
            cluster, logs = _undisturbed(thread, lambda: _connect(config, num_actors))
            gc.freeze()  # what is imported stays: no collection need look through it
            with signals_as_interrupt():  # once more: Ray has put a handler of its own in place, which aborts
                yield cluster
        except (ActorError, StuckError) as error:
            raise type(error)(f"{error}. What its processes printed is in {logs}, in files named *.err") from error
        finally:
            _undisturbed(thread, ray.shutdown)
            gc.unfreeze()


def _connect(config: RayConfig, num_actors: int) -> tuple[Cluster, str]:
    """Return the cluster, and the folder of the log files, which has the same path on every node."""
    address = config.address
    try:
        if address is None:
            local = LocalCluster(config, num_actors, _QUIET)
            return Cluster(local), _log_folder(local.context)
        _knock(address)
        context = ray.init(address=address, **_QUIET)
        about = getattr(context, "address_info", {})  # a connection through ray:// has none
        return Cluster(None, about.get("gcs_address") or address.removeprefix("ray://")), _log_folder(context)
    except ConfigError:
        raise
    except Exception as error:
        # Ray raises whatever comes up, a bare Exception too.
        reason = f"({shortened(f'{type(error).__name__}: {error}')})"
        if address is None:
            raise ConfigError(f"Ray could not start a cluster on this machine {reason}") from error
        raise ConfigError(
            f"ray.address={address}: no Ray cluster answers there {reason}; start one with `ray start --head`, or "
            "leave the address out: then one is started for the job"
        ) from error


def _log_folder(context: Any) -> str:
    about = getattr(context, "address_info", {})  # a connection through ray:// has none
    return f"{about.get('session_dir', '<its session folder>')}/logs"


def _knock(address: str) -> None:
    """Try a host:port first: where nobody answers, Ray tries on for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


async def _is_open(address: str) -> bool:
    """Whether somebody listens at a host:port; where none is known, that cannot be told."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return True
    try:
        async with asyncio.timeout(_CALL_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
            await writer.wait_closed()
    except OSError:  # TimeoutError too
        return False
    return True


def _undisturbed(thread: ThreadPoolExecutor, call: Callable[[], T]) -> T:
    """Call something in a thread, so that no signal cuts it off: Ctrl-C comes up here once the call is over.

    Cut off halfway, `ray.init` and `ray.shutdown` leave processes behind, or crash. In the main thread `ray.init` would
    also leave by SystemExit at SIGTERM. The thread must live on: Linux ends what Ray has started with the thread that
    started it.
    """
    future = thread.submit(call)
    try:
        return future.result()
    finally:
        wait([future])
