"""When the library's own clipping is right, and calling it then.

It sums squares over one group only, that of the last parameter: right where all parameters are sharded over all ranks,
and nowhere else. `verl_fsdp.update.grad_norm` is right everywhere.
"""

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from verl_fsdp.update.grad_norm import clip_gradients
from verl_fsdp_turbo.library import MODULE

_LOG: Final = logging.getLogger(__name__)


def library_clip(
    model: torch.nn.Module, trained: list[torch.nn.Parameter], max_norm: float, device: torch.device
) -> Callable[[float], torch.Tensor] | None:
    """Return what clips by the library's ``clip_grad_norm`` where that computes the norm of the whole gradient.

    It is a function of the scale that the gradients have, which it divides out first; None where the norm is another.
    """
    if not trained or not all(_is_sharded_by_all(parameter, device) for parameter in trained):
        return None
    try:
        module: Any = importlib.import_module(f"{MODULE}.training.clip_grads")
    except ImportError as error:  # its package imports a whole trainer, with libraries of its own
        _LOG.info("%s.training.clip_grads cannot be imported (%s): gradients are clipped without it", MODULE, error)
        return None

    def clip(scale: float) -> torch.Tensor:
        clip_gradients(trained, torch.zeros(()), math.inf, scale)  # no limit: this only divides the scale out
        return torch.tensor(module.clip_grad_norm(model=model, max_norm=max_norm))

    return clip


def _is_sharded_by_all(parameter: torch.nn.Parameter, device: torch.device) -> bool:
    """Whether each rank has a part of its own, on the device that the ranks of its mesh talk through."""
    if not isinstance(parameter, DTensor) or parameter.device.type != device.type:
        return False
    mesh = parameter.device_mesh
    sharded = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    return len(sharded) == 1 and mesh.size(sharded[0]) == dist.get_world_size()
