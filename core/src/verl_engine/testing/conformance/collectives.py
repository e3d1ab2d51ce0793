"""Count the collectives that add something up over data-parallel ranks, whoever calls them."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_engine.engine.process_group import process_groups


class ReductionCounter(TorchDispatchMode):
    """Counts reductions over groups within `ranks`, at torch's dispatcher: also those that C++ code calls."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch annotates it in part
        self._ranks = set(dist.get_process_group_ranks(group or dist.group.WORLD))
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it takes itself apart first; its collectives come by then
        is_reduction = func.namespace in ("c10d", "_c10d_functional") and "reduce" in str(func)
        if is_reduction and any(len(ranks) > 1 and ranks <= self._ranks for ranks in _groups(args)):
            self.count += 1
        return func(*args, **(kwargs or {}))


def _groups(args: tuple[Any, ...]) -> Iterator[set[int]]:
    for argument in args:
        group: dist.ProcessGroup | None = None
        if isinstance(argument, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(argument)
            except RuntimeError:  # an object of another class
                continue
        elif isinstance(argument, str):
            # Found so as resolving a name raises for those of none, which other text arguments are.
            group = next((group for group in process_groups() if group.group_name == argument), None)
        if group is not None:
            yield set(dist.get_process_group_ranks(group))
