"""The Ray cluster of a job: one of its own, or one that runs already."""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import ray

from verl_async.ray.answers import ActorError
from verl_async.termination import sigterm_as_interrupt
from verl_engine.contract.errors import ConfigError, StuckError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from verl_async.config import RayConfig

T = TypeVar("T")

_QUIET: Final[dict[str, Any]] = {"logging_level": logging.ERROR, "log_to_driver": False}
"""Neither Ray's own remarks nor what the processes print goes between the lines of our progress."""

_KNOCK_S: Final = 10.0


@contextmanager
def ray_cluster(config: RayConfig, num_actors: int) -> Iterator[None]:
    """Connect to the cluster, or start one on this machine; on leaving, all that was started is ended.

    Args:
        config: the ``ray`` section.
        num_actors: how many the job starts: a cluster of its own has a CPU slot for each, whatever the machine has.
    Raises:
        ConfigError: the address does not answer, or Ray does not start here.
    """
    with ThreadPoolExecutor(1, "ray") as thread:
        logs = ""
        try:
            logs = _undisturbed(thread, lambda: _connect(config, num_actors))
            with sigterm_as_interrupt():  # once more: Ray has put a handler of its own in place, which aborts
                yield
        except (ActorError, StuckError) as error:
            raise type(error)(f"{error}. What its processes printed is in {logs}, in files named *.err") from error
        finally:
            _undisturbed(thread, ray.shutdown)


def _connect(config: RayConfig, num_actors: int) -> str:
    """Return the folder of the log files, which has the same path on every node."""
    address = config.address
    try:
        if address is None:
            context = ray.init(
                # Without it, Ray would take a cluster that it finds in RAY_ADDRESS, or one that runs on this machine.
                address="local",
                num_cpus=max(num_actors, os.cpu_count() or 1),
                object_store_memory=config.object_store_bytes,
                include_dashboard=False,
                **_QUIET,
            )
        else:
            _knock(address)
            context = ray.init(address=address, **_QUIET)
    except Exception as error:
        # Ray raises whatever comes up, a bare Exception too.
        reason = f"({type(error).__name__}: {error})"
        if address is None:
            raise ConfigError(f"Ray could not start a cluster on this machine {reason}") from error
        raise ConfigError(
            f"ray.address={address}: no Ray cluster answers there {reason}; start one with `ray start --head`, or "
            "leave the address out: then one is started for the job"
        ) from error
    about = getattr(context, "address_info", {})  # a connection through ray:// has none
    return f"{about.get('session_dir', '<its session folder>')}/logs"


def _knock(address: str) -> None:
    """Try a host:port first: where nobody answers, Ray tries on for a quarter of an hour."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()


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
