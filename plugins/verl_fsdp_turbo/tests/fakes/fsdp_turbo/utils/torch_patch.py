"""An operation of reductions that some devices lack: a sum of what was multiplied before."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def apply_hccl_premul_sum_patch() -> None:
    """Wrap torch's reductions, again if they are wrapped already."""
    for name in ("all_reduce", "reduce_scatter", "reduce_scatter_tensor"):
        setattr(dist, name, _multiplying(getattr(dist, name)))


def _multiplying(reduce: Any) -> Any:
    def wrapper(*args: Any, **options: Any) -> Any:
        factor = None
        if options.get("op") == dist.ReduceOp.PREMUL_SUM:
            factor = options["op"].__getstate__()[1]
            options["op"] = dist.ReduceOp.SUM
        handle = reduce(*args, **options)
        if handle is not None:
            handle.wait()
        if factor is not None:
            args[0].mul_(factor)
        return handle

    return wrapper
