"""Run a function on several gloo ranks of this machine, and report the failure that came first."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

Result = TypeVar("Result")


class RankError(AssertionError):
    """A rank failed; the message holds the earliest failure, since the others often only say that a peer was gone."""


def run_ranks(
    function: Callable[..., Result], *args: object, world_size: int = 2, timeout_s: float = 120.0
) -> list[Result]:
    """Call ``function(rank, *args)`` in `world_size` fresh processes that share a gloo process group.

    Args:
        function: module-level and picklable, as its arguments and result must be.
        args: passed to every rank.
        world_size: number of processes, each with one CPU thread.
        timeout_s: for all of it; then the ranks are killed and the silent ones named.
    Returns:
        Each rank's result, in rank order.
    Raises:
        RankError: a rank raised, died or did not answer in time.
    """
    context = multiprocessing.get_context("forkserver")
    # The server imports torch once; each rank is then a fork of it, which is several times faster than a fresh start.
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "transformers"])
    deadline = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
        processes = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, f"{folder}/store", timeout_s, writer, function, args),
                daemon=True,
            )
            for rank, (_, writer) in enumerate(pipes)
        ]
        try:
            for process in processes:
                process.start()
            for _, writer in pipes:
                writer.close()
            answers = [_receive(reader, deadline) for reader, _ in pipes]
        finally:
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()
    failures = [(when, rank, text) for rank, (when, text, _) in enumerate(answers) if text is not None]
    if failures:
        _, rank, text = min(failures)
        raise RankError(f"rank {rank} of {world_size} failed first:\n{text}")
    return [result for _, _, result in answers]


def _receive(reader: Connection, deadline: float) -> tuple[float, str | None, Any]:
    """Wait for one rank's (time, failure or None, result)."""
    if not reader.poll(max(0.0, deadline - time.monotonic())):
        return time.monotonic(), "no answer in time", None
    try:
        answer: tuple[float, str | None, Any] = pickle.loads(reader.recv_bytes())  # noqa: S301 - our own child
    except EOFError:
        return time.monotonic(), "the process died without an answer", None
    return answer


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    timeout_s: float,
    writer: Connection,
    function: Callable[..., Any],
    args: tuple[object, ...],
) -> None:
    """Be one rank: join the group, call the function, send what came of it."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        # Plain pickle copies tensors; multiprocessing's own would share them with a process that is about to end.
        writer.send_bytes(pickle.dumps((time.monotonic(), None, function(rank, *args))))
        dist.barrier()
    except BaseException:  # noqa: BLE001 - also a SystemExit must reach the parent
        writer.send_bytes(pickle.dumps((time.monotonic(), traceback.format_exc(), None)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
