"""The ``engine`` section of the fsdp2 backend. Imports no torch."""

from __future__ import annotations

from typing import Literal

from verl_engine.contract.engine_config import EngineConfig


class Fsdp2Config(EngineConfig):
    """PyTorch ``fully_shard`` over all data-parallel ranks."""

    backend: Literal["fsdp2"] = "fsdp2"
    """Fixed: this section is for ``fsdp2``."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are gathered and computed in. Master weights, gradient accumulation and reduction stay
    float32."""
    packing: bool = True
    """Lay the sequences of a micro-batch end to end with attention kept inside each. False pads them to the longest,
    for models whose attention cannot be told where sequences end; slower on mixed lengths."""
    gradient_sync: Literal["last_micro_batch", "every_micro_batch"] = "last_micro_batch"
    """When gradients are reduced over the ranks. At the last micro-batch only: least traffic, but each rank holds a
    whole float32 gradient (4 bytes a parameter) meanwhile. At each: 4 / ranks bytes a parameter, and one reduction for
    each."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward, and gather them again; False keeps them, which is faster
    and takes more memory."""
