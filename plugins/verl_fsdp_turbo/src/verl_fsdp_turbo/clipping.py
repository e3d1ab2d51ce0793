"""When the library's own clipping is right, and calling it then.

It sums squares over one group only, that of the last parameter: right where all parameters are sharded over all ranks,
and nowhere else. `verl_fsdp.update.grad_norm` is right everywhere.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from verl_fsdp_turbo.install_steps import MODULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LOG: Final = logging.getLogger(__name__)


def library_clip(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> Callable[..., float] | None:
    """Return the library's ``clip_grad_norm`` where it computes the norm of the whole gradient; None elsewhere.

    Args:
        parameters: all that are trained, sharded.
        device: of this rank.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not all(_is_sharded_by_all(parameter, device) for parameter in trained):
        return None
    try:
        module: Any = importlib.import_module(f"{MODULE}.training.clip_grads")
    except ImportError as error:  # its package imports a whole trainer, with libraries of its own
        _LOG.info("%s.training.clip_grads cannot be imported (%s): gradients are clipped without it", MODULE, error)
        return None
    return cast("Callable[..., float]", module.clip_grad_norm)


def unscale(parameters: Iterable[torch.nn.Parameter], scale: float) -> None:
    """Divide a loss scale out of all gradients, in place."""
    shards = [
        parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        for parameter in parameters
        if parameter.grad is not None
    ]
    if shards and scale != 1.0:
        torch._foreach_mul_(shards, 1.0 / scale)


def _is_sharded_by_all(parameter: torch.nn.Parameter, device: torch.device) -> bool:
    """Whether each rank has a part of its own, on the device that the ranks of its mesh talk through."""
    if not isinstance(parameter, DTensor) or parameter.device.type != device.type:
        return False
    mesh = parameter.device_mesh
    sharded = [dim for dim, placement in enumerate(parameter.placements) if isinstance(placement, Shard)]
    return len(sharded) == 1 and mesh.size(sharded[0]) == dist.get_world_size()
