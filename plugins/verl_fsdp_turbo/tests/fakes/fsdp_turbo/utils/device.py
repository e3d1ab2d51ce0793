"""Which accelerator there is."""

from __future__ import annotations

import torch


def get_accelerator_name() -> str:
    """Name it; a CPU is none."""
    if torch.cuda.is_available():
        return "cuda"
    raise RuntimeError("No available accelerator (NPU/CUDA).")
