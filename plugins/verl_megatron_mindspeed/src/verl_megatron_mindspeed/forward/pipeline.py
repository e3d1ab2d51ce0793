"""What the ranks of a pipeline tell each other when a schedule is through."""

import pickle
from typing import Any

import torch
import torch.distributed as dist

from verl_engine.contract.errors import EngineError
from verl_engine.engine.metrics import Key
from verl_megatron_mindspeed.parallel import Parallel


def agree(parallel: Parallel, failure: Exception | None, keys: tuple[Key, ...] = ()) -> tuple[Key, ...]:
    """Raise on all ranks of a pipeline what went wrong on one; return the last stage's keys of metrics.

    Raises:
        Exception: `failure`, or else that of the first stage that has one; an EngineError that describes it where it
            cannot be pickled.
    Collectives: an all-gather of objects over the pipeline's ranks.
    """
    pipeline = parallel.pipeline
    told: list[tuple[bytes | str | None, tuple[Key, ...]]] = [(None, ())] * pipeline.size
    dist.all_gather_object(told, (_portable(failure), keys), group=pipeline.group)
    if failure is not None:
        raise failure
    for stage, (found, _) in enumerate(told):
        if found is not None:
            where = EngineError(f"pipeline stage {stage} failed; this is stage {pipeline.rank}")
            raise _restored(found, stage) from where
    return told[-1][1]


def from_last_stage(values: torch.Tensor, parallel: Parallel) -> torch.Tensor:
    """Return the last stage's values, in place, on every rank of a pipeline, which have the same shape; a broadcast."""
    pipeline = parallel.pipeline
    if pipeline.size > 1:
        dist.broadcast(values, src=dist.get_global_rank(pipeline.group, pipeline.size - 1), group=pipeline.group)
    return values


def _portable(failure: Exception | None) -> bytes | str | None:
    """Pickle an exception; where that does not bring it back, describe it."""
    if failure is None:
        return None
    try:
        packed = pickle.dumps(failure)
        pickle.loads(packed)  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - a class can fail in any way
        return f"{type(failure).__name__}: {failure}"
    return packed


def _restored(found: bytes | str, stage: int) -> Exception:
    if isinstance(found, str):
        return EngineError(f"pipeline stage {stage} failed with {found}")
    try:
        error: Any = pickle.loads(found)  # noqa: S301 - from a rank of this job
    except Exception as cause:  # noqa: BLE001 - its module may be missing here
        return EngineError(f"pipeline stage {stage} failed, and what it raised cannot be read here: {cause}")
    return error if isinstance(error, Exception) else EngineError(f"pipeline stage {stage} failed with {error!r}")
