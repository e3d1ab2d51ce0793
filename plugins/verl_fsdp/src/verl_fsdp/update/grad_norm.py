"""The gradient's norm over all ranks, and clipping by it, whatever meshes the parameters are on."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate


def grad_norm(
    parameters: Iterable[torch.nn.Parameter],
    group: dist.ProcessGroup | None,
    *,
    plain_copies: int = 1,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Compute the L2 norm of the whole gradient.

    Each rank adds up the squares of what it has, divided by how many ranks have the same; the sum over all ranks then
    counts every entry once, on any mix of meshes, in a single all-reduce. So all ranks agree on the result to the last
    bit, and one entry that is not finite anywhere shows on all of them.

    Args:
        parameters: DTensors on any mesh within `group`, sharded or replicated along any of its dims, and plain tensors;
            those without gradient count as zero.
        group: every rank that has a part of the gradient; None for all.
        plain_copies: how many ranks of `group` have the same of each tensor that is no DTensor: 1 where they are
            shards, all of them where they are replicated.
        device: where the result is, and the all-reduce happens; by default where the gradients are.
    Returns:
        Scalar float32; the same on every rank, not finite if any gradient on any rank is not.
    Collectives: one all-reduce over `group`, also where this rank holds no gradient.
    """
    size = dist.get_world_size(group)
    by_copies: dict[int, list[torch.Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters):
        local = _local(gradient)
        if local.numel():
            by_copies[_copies(gradient, size, plain_copies)].append(local)
    if device is None:
        device = next((shards[0].device for shards in by_copies.values()), torch.device("cpu"))
    squares = torch.zeros((), device=device)
    for copies, shards in by_copies.items():
        # The norm of a 16-bit tensor would be rounded to 16 bits.
        norms = torch._foreach_norm(shards, 2, torch.float32)  # noqa: SLF001 - torch has no public name
        squares += torch.stack([norm.to(device) for norm in norms]).square().sum() / copies
    if size > 1:
        dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], norm: torch.Tensor, max_norm: float, scale: float = 1.0
) -> torch.Tensor:
    """Scale all gradients down so that their norm is at most `max_norm`; as torch's ``clip_grad_norm_``.

    Leaves them untouched where the norm is not finite: clipping by it would write NaN into every one of them. `norm` is
    what `grad_norm` returned; `scale` a factor of a loss scale on all gradients, which is divided out in the same pass.
    Returns the norm of the gradient without `scale`, before clipping. No collectives.
    """
    unscaled = norm / scale
    value = float(unscaled)
    if math.isfinite(value):
        factor = min(max_norm / (value + 1e-6), 1.0) / scale
        shards = [_local(gradient) for gradient in _gradients(parameters)]
        if shards and factor != 1.0:
            torch._foreach_mul_(shards, factor)
    return unscaled


def clip_by_norm(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, *, plain_copies: int, device: torch.device
) -> Callable[[float], torch.Tensor]:
    """Return what clips by the norm over all ranks, given the scale of all gradients; see `grad_norm`."""
    trained = list(parameters)

    def clip(scale: float) -> torch.Tensor:
        norm = grad_norm(trained, None, plain_copies=plain_copies, device=device)
        return clip_gradients(trained, norm, max_norm, scale)

    return clip


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    if not isinstance(gradient, DTensor):
        return gradient
    assert not any(isinstance(placement, Partial) for placement in gradient.placements), gradient.placements
    return gradient.to_local()


def _copies(gradient: torch.Tensor, size: int, plain_copies: int) -> int:
    """Say how many of `size` ranks hold the same as this one."""
    if not isinstance(gradient, DTensor):
        return plain_copies
    sharded = math.prod(
        gradient.device_mesh.size(dim)
        for dim, placement in enumerate(gradient.placements)
        if not isinstance(placement, Replicate)
    )
    return size // sharded
