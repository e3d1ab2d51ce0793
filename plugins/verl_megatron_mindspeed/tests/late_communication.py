"""Communication as late as it may be: what is freed, changed or read too early shows in the numbers, each time.

On CUDA a stream orders what a program starts; gloo reads and writes memory when it comes to it. Here each send begins
late, what is received arrives when it is waited for, and an asynchronous collective does all its work then.
"""

from __future__ import annotations

import contextlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

_COLLECTIVES: Final = (
    "all_gather all_gather_into_tensor _all_gather_base all_reduce all_to_all_single broadcast reduce_scatter "
    "reduce_scatter_tensor _reduce_scatter_base"
)
_DELAY_S: Final = 0.01


class _Operation(NamedTuple):
    """As torch's ``P2POp``, which takes torch's own functions only."""

    op: Callable[..., Any]
    tensor: torch.Tensor
    peer: int
    group: dist.ProcessGroup | None = None


class _Handle:
    """Does its work when it is waited for."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work

    def wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()


def communicate_late(patch: pytest.MonkeyPatch, *, sends: bool) -> None:
    """Let everything asynchronous of Megatron be late in this process.

    Args:
        patch: takes it back.
        sends: whether sends are late as well. Where they are on all ranks, none is later than another.
    """
    changed = _late_collectives() | {dist.irecv: partial(_receive, dist.irecv)}
    if sends:
        changed[dist.isend] = partial(_send, dist.isend, ThreadPoolExecutor(1))
    patch.setattr(dist, "P2POp", _Operation)
    patch.setattr(dist, "batch_isend_irecv", lambda operations: [each.op(*each[1:]) for each in operations])
    users = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    for module in (dist, *users):
        for name, value in list(vars(module).items()):
            if type(value) is type(_send) and value in changed:
                patch.setattr(module, name, changed[value])


def _send(send: Callable[..., Any], sender: ThreadPoolExecutor, tensor: torch.Tensor, dst: int, group: Any) -> _Handle:
    def begin() -> Any:
        time.sleep(_DELAY_S)
        return send(tensor, dst, group)

    sending = sender.submit(begin)
    return _Handle(lambda: sending.result().wait())


def _receive(receive: Callable[..., Any], tensor: torch.Tensor, src: int, group: Any) -> _Handle:
    found, target = torch.empty_like(tensor), tensor.detach()
    receiving = receive(found, src, group)
    target.fill_(torch.nan if target.is_floating_point() else -1)

    def arrive() -> None:
        receiving.wait()
        target.copy_(found)

    return _Handle(arrive)


def _late_collectives() -> dict[Any, Any]:
    coalesce = distributed_c10d._coalescing_manager
    together: list[list[_Handle]] = []

    def late(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, async_op: bool = False, **options: Any) -> Any:
            if not async_op:
                return collective(*args, **options)
            handle = _Handle(partial(collective, *args, **options))
            for handles in together[-1:]:
                handles.append(handle)
            return handle

        return call

    @contextlib.contextmanager
    def late_together(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        if not async_ops:
            with coalesce(group, device) as manager:
                yield manager
            return
        handles: list[_Handle] = []

        def wait_for_all() -> None:
            for handle in handles:
                handle.wait()

        together.append(handles)
        yield _Handle(wait_for_all)
        together.pop()

    found = [getattr(dist, name) for name in _COLLECTIVES.split()]
    return {coalesce: late_together, **{collective: late(collective) for collective in found}}
