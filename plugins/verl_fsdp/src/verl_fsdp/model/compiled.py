"""torch.compile on a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AttentionInterface

from verl_fsdp.forward.attention import PACKED_ATTENTION, packed_attention

if TYPE_CHECKING:
    from verl_fsdp.config import ShardedConfig


def compile_block(block: torch.nn.Module, config: ShardedConfig) -> None:
    """Compile a block in place, before it is sharded; its weights keep their names. No effect unless configured."""
    if not config.compile:
        return
    # Where sequences lie differs from one micro-batch to the next: a graph with attention in it would be compiled anew
    # for each, and after eight of them torch gives up and runs uncompiled.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
    # The number of tokens differs too. By default torch finds that out by a first graph for one number only; where both
    # fit, a checkpoint's recomputation may take the other one than the forward, and fails.
    block.compile(backend=config.compile_backend, dynamic=True)
