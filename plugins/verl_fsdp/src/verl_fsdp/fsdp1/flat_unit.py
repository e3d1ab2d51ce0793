"""One wrapped module's weights: many parameters end to end in one flat tensor, cut evenly over the ranks.

All that is private in FSDP1 and concerns where weights lie is read here, and nowhere else: FSDP1 has had these names
since torch 2.1, and no public one for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel


@dataclass(frozen=True, slots=True)
class FlatMember:
    """One parameter's place in a unit."""

    name: str
    parameter: torch.nn.Parameter
    """The one that the optimizer has: this rank's piece, a vector, maybe empty. (Whole where nothing is sharded.)"""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    """Where it begins in the unit's flat tensor."""

    @property
    def numel(self) -> int:
        """Entries of the whole parameter."""
        return prod(self.shape)


class FlatUnit:
    """The weights of one wrapped module, and this rank's shard of them."""

    def __init__(self, handle: Any, names: Mapping[int, str], device: torch.device) -> None:
        """Look at FSDP1's own record of an initialised module, whose parameters have names by their ids.

        The device is that on which the ranks communicate; weights may be elsewhere for a while.
        """
        self.handle = handle
        self._device = device
        is_sharded = handle.uses_sharded_strategy
        self.num_ranks = dist.get_world_size(handle.process_group) if is_sharded else 1
        self._rank = dist.get_rank(handle.process_group) if is_sharded else 0
        flat = handle.flat_param
        starts, position = [], 0
        for numel, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):  # noqa: SLF001
            if not is_padding:
                starts.append(position)
            position += numel
        self.members = tuple(
            FlatMember(names[id(parameter)], parameter, tuple(shape), start)
            for parameter, shape, start in zip(flat._params, flat._shapes, starts, strict=True)  # noqa: SLF001
        )

    @property
    def local(self) -> torch.Tensor:
        """[unit's entries / ranks]: this rank's shard, live, never the gathered weights."""
        shard: torch.Tensor = self.handle.flat_param._local_shard.detach()  # noqa: SLF001
        return shard

    def replace_local(self, shard: torch.Tensor) -> None:
        """Put another tensor of the same values in place of the shard, on another device maybe."""
        flat = self.handle.flat_param
        flat.data = shard
        flat._local_shard = flat.data  # noqa: SLF001
        self.handle._use_sharded_views()  # noqa: SLF001 - the parameters are views of the new one

    @property
    def numel(self) -> int:
        """Entries of all members."""
        return sum(member.numel for member in self.members)

    def span(self, member: FlatMember) -> tuple[int, int]:
        """Return where this rank's piece of a member begins and ends, counted in the member's own entries."""
        size = self.local.numel()
        begin = self._rank * size - member.start
        return min(max(begin, 0), member.numel), min(max(begin + size, 0), member.numel)

    def piece(self, member: FlatMember, local: torch.Tensor | None = None) -> torch.Tensor:
        """Return a member's part of the shard, or of another tensor of its size: a vector, maybe empty, a view."""
        begin, end = self.span(member)
        shard = self.local if local is None else local
        if begin == end:
            return shard[:0]
        offset = member.start - self._rank * shard.numel()
        return shard[begin + offset : end + offset]

    def gather(self, local: torch.Tensor | None = None) -> torch.Tensor:
        """Return the unit's whole flat tensor, on the device. Collectives: one all-gather over the ranks of a copy."""
        shard = (self.local if local is None else local).to(self._device)
        if self.num_ranks == 1:
            return shard
        whole = shard.new_empty(shard.numel() * self.num_ranks)
        # torch 2.13 warns of the old name, and earlier ones do not have the new.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(whole, shard, group=self.handle.process_group)
        return whole

    def whole(self, member: FlatMember, flat: torch.Tensor) -> torch.Tensor:
        """View one member in what `gather` returned."""
        return flat[member.start : member.start + member.numel].view(member.shape)


def flat_units(root: FullyShardedDataParallel, names: Mapping[int, str], device: torch.device) -> list[FlatUnit]:
    """List the units below a root that is initialised; modules without weights of their own have none."""
    handles = [getattr(module, "_handle", None) for module in root.fsdp_modules(root)]
    return [FlatUnit(handle, names, device) for handle in handles if handle is not None]
