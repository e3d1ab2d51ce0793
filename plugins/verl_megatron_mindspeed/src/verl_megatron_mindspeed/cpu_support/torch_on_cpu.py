"""Torch, as Megatron's modules see it on a CPU: where they ask for a CUDA device, they get the CPU.

This module stands in for ``torch`` under that name in the modules of
`verl_megatron_mindspeed.cpu_support.patch_list`; for everybody else torch is as it was. What is not defined here is
torch's own.
"""

from collections.abc import Callable
from typing import Any

import torch

from verl_megatron_mindspeed.cpu_support import collectives_on_cpu as distributed
from verl_megatron_mindspeed.cpu_support import cuda_on_cpu as cuda

__all__ = ["arange", "cuda", "distributed", "empty", "full", "ones", "tensor", "zeros"]


def __getattr__(name: str) -> Any:
    """Hand through all the rest."""
    return getattr(torch, name)


def _on_cpu(options: dict[str, Any]) -> dict[str, Any]:
    """Replace a CUDA device, and leave pinned memory out, which there is none of."""
    options.pop("pin_memory", None)
    if str(options.get("device")).partition(":")[0] == "cuda":
        options["device"] = "cpu"
    return options


def _here(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *args, **options: make(*args, **_on_cpu(options))


arange, empty, full = _here(torch.arange), _here(torch.empty), _here(torch.full)
ones, tensor, zeros = _here(torch.ones), _here(torch.tensor), _here(torch.zeros)
