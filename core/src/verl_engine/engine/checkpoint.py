"""All of an engine's state in a folder, through torch's distributed checkpoints: any number of ranks may read it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from verl_engine.contract.errors import WeightsError

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.engine.base import Engine


def save_checkpoint(engine: Engine, folder: Path) -> None:
    """Write the engine's state; the folder appears under its name only when it is whole, in place of what was there.

    Args:
        engine: between two steps.
        folder: the same on every rank, on storage that all ranks see.
    Collectives: those of torch's distributed checkpoints, and barriers.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    if _is_first(engine):
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
    _barrier(engine)
    save(engine.state_dict(), checkpoint_id=partial, no_dist=not dist.is_initialized())
    _barrier(engine)
    if _is_first(engine):
        former = folder.with_name(f".{folder.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            folder.rename(former)
        partial.rename(folder)
        shutil.rmtree(former, ignore_errors=True)
    _barrier(engine)


def load_checkpoint(engine: Engine, folder: Path) -> None:
    """Resume from a folder that `save_checkpoint` wrote, on as many ranks as now are.

    Raises:
        WeightsError: there is no whole checkpoint in the folder.
    Collectives: those of torch's distributed checkpoints.
    """
    if not (folder / ".metadata").is_file():
        raise WeightsError(f"{folder} holds no whole checkpoint (there is no .metadata in it)")
    state = engine.state_dict()
    load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    engine.load_state_dict(state)


def _is_first(engine: Engine) -> bool:
    return engine.data_parallel.rank == 0


def _barrier(engine: Engine) -> None:
    if engine.data_parallel.size > 1:
        dist.barrier(engine.data_parallel.group)
