"""Put the patches in place."""

import logging
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch

from verl_engine.patching.patches import patch
from verl_megatron_mindspeed.cpu_support import cuda_on_cpu, torch_on_cpu
from verl_megatron_mindspeed.cpu_support.patch_list import (
    DISPATCH_PATCH,
    GET_RANDOM_PATCH,
    ROUTER_PATCH,
    SET_RANDOM_PATCH,
    TENSOR_PATCHES,
    TORCH_PATCHES,
)
from verl_megatron_mindspeed.cpu_support.tensors_like_cuda import with_tensors_like_cuda

_ADVICE_FOR_CUDA: Final = (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "When using (async grad allreduce|sequence parallelism) it is recommended to set .*CUDA_DEVICE_MAX_CONNECTIONS",
)
"""Beginnings of warnings that Megatron gives at its import or while it builds a model, and that say nothing here."""


def install() -> None:
    """Patch Megatron's modules when they are imported; call it once, in ``engine_prepare_process``."""
    for declared in TORCH_PATCHES:
        patch(declared.target, lambda _: torch_on_cpu)
    for declared in TENSOR_PATCHES:
        patch(declared.target, with_tensors_like_cuda)
    patch(GET_RANDOM_PATCH.target, lambda _: cuda_on_cpu.get_rng_state)
    patch(SET_RANDOM_PATCH.target, lambda _: _set_rng_state)
    patch(DISPATCH_PATCH.target, _making_numpy)
    patch(ROUTER_PATCH.target, lambda _: _router_gating_linear)
    for words in _ADVICE_FOR_CUDA:
        warnings.filterwarnings("ignore", words, UserWarning, module=r"megatron\.core\.")
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_no_false_alarm)


def _is_no_false_alarm(record: logging.LogRecord) -> bool:
    """Drop Megatron's alarm, at each dropout, that the CPU's random numbers moved: here they are the device's."""
    return "CPU RNG state changed" not in record.getMessage()


def _set_rng_state(new_state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(new_state)


def _making_numpy(move: Callable[..., Any]) -> Callable[..., Any]:
    """Let Megatron's function make numpy arrays also of what is on the CPU already."""

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = move(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    return maybe_move_tensor_to_cpu


def _router_gating_linear(
    inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, router_dtype: torch.dtype
) -> torch.Tensor:
    """Score experts, [..., experts] in the router's dtype, for [..., hidden] of any dtype."""
    wide_bias = None if bias is None else bias.to(router_dtype)
    return torch.nn.functional.linear(inp.to(router_dtype), weight.to(router_dtype), wide_bias)
