"""When gradients are reduced over the ranks, by what a rank must hold of them meanwhile."""

import logging
import os
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist

from verl_engine.engine.device import Device
from verl_fsdp.config import ShardedConfig

_LOG: Final = logging.getLogger("verl_fsdp")
_BYTES: Final = 4
"""Of one gradient entry: accumulation is float32."""
_SHARE_OF_MEMORY: Final = 4
"""By default held gradients may take one part in so many of the memory: weights, optimizer state and activations need
the rest."""


@dataclass(frozen=True, slots=True)
class SyncChoice:
    """When gradients are reduced, and what that costs; the same on every rank."""

    mode: Literal["last_micro_batch", "every_micro_batch"]
    held_bytes: int
    """What a rank holds of gradients while it accumulates, in this mode."""
    last_bytes: int
    """The same if gradients are reduced at the last micro-batch only: a whole gradient."""
    every_bytes: int
    """The same if they are reduced at each: a shard of it."""
    reason: str
    """Why this mode, in a few words."""


def choose_sync(
    config: ShardedConfig, num_trained: int, num_own: int, device: Device, *, must_reduce: str = ""
) -> SyncChoice:
    """Decide as ``gradient_sync`` says; for ``auto`` by memory. Logs the choice, once, on the first rank.

    Whatever ``param_dtype`` is, an entry takes 4 bytes.

    Args:
        config: the ``engine`` section.
        num_trained: entries of the trained parameters that a rank gathers, which it holds when it reduces at the last
            micro-batch only.
        num_own: entries of its own shards of them, which it holds when it reduces at each; the same on every rank.
        device: of this rank.
        must_reduce: why ``auto`` may not hold gradients back, where the backend cannot do so in float32.
    Collectives: for ``auto`` one all-reduce over all ranks: those with the least memory decide for all.
    """
    if config.forward_only:
        num_trained = num_own = 0
    last_bytes = num_trained * _BYTES
    every_bytes = num_own * _BYTES
    mode, reason = config.gradient_sync, "as configured"
    if mode == "auto":
        budget, limit = _budget(config, device)
        if must_reduce:
            mode, reason = "every_micro_batch", f"auto: {must_reduce}"
        elif last_bytes <= budget:
            mode, reason = "last_micro_batch", f"auto: a whole gradient fits {limit}"
        elif every_bytes == last_bytes:
            mode, reason = "last_micro_batch", f"auto: a whole gradient does not fit {limit}, but it is not sharded"
        else:
            mode, reason = "every_micro_batch", f"auto: a whole gradient does not fit {limit}"
    held_bytes = last_bytes if mode == "last_micro_batch" else every_bytes
    choice = SyncChoice(mode, held_bytes, last_bytes, every_bytes, reason)
    if num_trained and dist.get_rank() == 0:
        _LOG.info(
            "gradients are reduced at %s (%s); each rank holds %d bytes of gradients while it accumulates "
            "(last_micro_batch: %d, every_micro_batch: %d)",
            mode,
            reason,
            held_bytes,
            last_bytes,
            every_bytes,
        )
    return choice


def _budget(config: ShardedConfig, device: Device) -> tuple[int, str]:
    if config.held_gradient_bytes is not None:
        own = config.held_gradient_bytes
    else:
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        own = device.memory_bytes(local_ranks) // _SHARE_OF_MEMORY
    # Ranks that decided differently would wait for each other in different collectives.
    agreed = torch.tensor(own, dtype=torch.int64, device=device.torch_device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    budget = int(agreed)
    if config.held_gradient_bytes is not None:
        return budget, f"held_gradient_bytes={budget}"
    return budget, f"a quarter of the memory, {budget} bytes"
