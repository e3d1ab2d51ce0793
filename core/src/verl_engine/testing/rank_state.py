"""What a call may leave behind in a rank that stays: it is put back before the next one, or the rank is given up."""

import os
import random
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank's state as it was when the rank had joined its process group."""

    environment: Mapping[str, str]
    folder: Path
    path: tuple[str, ...]
    filters: tuple[Any, ...]
    num_threads: int
    group: Any

    @classmethod
    def take(cls) -> Self:
        """Read it from this process."""
        import torch
        import torch.distributed as dist

        filters = tuple(warnings.filters)
        return cls(dict(os.environ), Path.cwd(), tuple(sys.path), filters, torch.get_num_threads(), dist.group.WORLD)

    def restore(self) -> None:
        """Put back what every call may expect: environment, folder, import path, torch's settings, equal seeds."""
        import numpy as np
        import torch

        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.path[:] = self.path
        warnings.filters[:] = self.filters  # type: ignore[index] # a list, whatever typeshed says
        torch.set_num_threads(self.num_threads)
        torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            torch.set_default_device("cpu")  # None would break the next question for it, before torch 2.13
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - what is seeded is the state that libraries share
        torch.manual_seed(0)

    def is_worn(self) -> bool:
        """Whether the process group was ended or replaced: that cannot be put back."""
        import torch.distributed as dist

        return dist.group.WORLD is not self.group


def end_groups() -> None:
    """End the groups that a call made: each of gloo's has threads, which wake a hundred times a second."""
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from verl_engine.engine.process_group import process_groups

    _clear_sharding_prop_cache()  # torch takes equal meshes for one, and would go on with the groups of the first
    for group in process_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
