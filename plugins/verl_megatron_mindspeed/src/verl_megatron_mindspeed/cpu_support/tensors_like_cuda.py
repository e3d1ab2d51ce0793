"""Tensors that behave as on CUDA, for the time of one call: some functions of Megatron ask them what they are."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _TensorsLikeCuda(TorchFunctionMode):
    """Active in the thread that entered it. Each call of torch takes some microseconds longer meanwhile."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def with_tensors_like_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make ``tensor.type()`` name CUDA's types and ``tensor.cuda()`` return the tensor, within a function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _TensorsLikeCuda():
            return function(*args, **kwargs)

    return wrapper
