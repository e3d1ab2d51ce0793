"""A rank's index among those that hold different data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class DataParallel:
    """This rank's index among the ranks that hold different data."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    """None only where there is a single rank and no process group."""
