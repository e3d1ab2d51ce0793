"""The ``engine`` section of a job that chose ``titan_engine``. Imports no torch."""

from typing import Literal

from verl_engine import EngineConfig


class TitanConfig(EngineConfig):
    """Qwen3 of torchtitan, sharded over all ranks by torchtitan's FSDP."""

    backend: Literal["titan_engine"] = "titan_engine"
    """Fixed: this section is for ``titan_engine``."""

    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters are gathered and computed in. Weights, gradients and the optimizer stay float32."""

    gradient_sync: Literal["last_micro_batch", "every_micro_batch"] = "last_micro_batch"
    """When gradients are reduced over the ranks."""
