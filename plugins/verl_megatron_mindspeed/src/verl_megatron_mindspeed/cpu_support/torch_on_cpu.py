"""Torch, as Megatron's modules see it on a CPU: where they ask for a CUDA device, they get the CPU.

This module stands in for ``torch`` under that name in the modules of
`verl_megatron_mindspeed.cpu_support.patch_list`; for everybody else torch is as it was. What is not defined here is
torch's own.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_megatron_mindspeed.cpu_support import collectives_on_cpu as distributed
from verl_megatron_mindspeed.cpu_support import cuda_on_cpu as cuda

__all__ = ["arange", "cuda", "distributed", "empty", "full", "ones", "tensor", "zeros"]


def __getattr__(name: str) -> Any:
    """Hand through all the rest."""
    return getattr(torch, name)


def arange(*args: Any, **options: Any) -> torch.Tensor:
    """As torch's, on the CPU."""
    return torch.arange(*args, **_on_cpu(options))


def empty(*args: Any, **options: Any) -> torch.Tensor:
    """As torch's, on the CPU."""
    return torch.empty(*args, **_on_cpu(options))


def full(*args: Any, **options: Any) -> torch.Tensor:
    """As torch's, on the CPU."""
    return torch.full(*args, **_on_cpu(options))


def ones(*args: Any, **options: Any) -> torch.Tensor:
    """As torch's, on the CPU."""
    return torch.ones(*args, **_on_cpu(options))


def tensor(*args: Any, **options: Any) -> torch.Tensor:
    """As torch's, on the CPU."""
    return torch.tensor(*args, **_on_cpu(options))


def zeros(*args: Any, **options: Any) -> torch.Tensor:
    """As torch's, on the CPU."""
    return torch.zeros(*args, **_on_cpu(options))


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Replace a CUDA device, and leave pinned memory out, which there is none of."""
    options.pop("pin_memory", None)
    if str(options.get("device")).partition(":")[0] == "cuda":
        options["device"] = "cpu"
    return options
