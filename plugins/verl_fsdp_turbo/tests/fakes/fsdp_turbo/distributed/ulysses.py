"""Attention functions that trade tokens for heads with the ranks that split a sequence."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable


def patch_functions(cp_plan: Any, group: dist.ProcessGroup) -> None:
    """Wrap what the plan names, again if it is wrapped already."""
    older = cp_plan.ulysses_core_attention_function or []
    for path in [older] if isinstance(older, str) else older:
        _replace(path, lambda plain: _default(plain, group))
    for patch in getattr(cp_plan, "ulysses_function_patches", ()):
        if patch["type"] != "full_attention":
            raise NotImplementedError(f"the stand-in has no {patch['type']}")
        for path in patch["target_functions"]:
            _replace(path, lambda plain: _full_attention(plain, group))


def _replace(path: str, wrap: Callable[[Any], Any]) -> None:
    module_name, _, name = path.rpartition(".")
    module = importlib.import_module(module_name)
    setattr(module, name, wrap(getattr(module, name)))


def _full_attention(plain: Any, group: dist.ProcessGroup) -> Any:
    @functools.wraps(plain)
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        groups = module.num_key_value_groups
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        query, key, value = (_trade(tensor, 1, 2, group) for tensor in (query, key, value))
        module.num_key_value_groups = 1
        try:
            output, _ = plain(module, query, key, value, *args, **kwargs)
        finally:
            module.num_key_value_groups = groups
        return _trade(output, 1, 2, group), None  # transformers returns [B, L, H, D]

    return attention


def _default(plain: Any, group: dist.ProcessGroup) -> Any:
    @functools.wraps(plain)
    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        groups = module.num_key_value_groups
        if groups > 1:  # transformers' function repeats them once more, which then do not fit
            key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
        query, key, value = (_trade(tensor, 1, 2, group) for tensor in (query, key, value))
        output, _ = plain(module, query, key, value, *args, **kwargs)
        return _trade(output, 2, 1, group), None  # as if it were [B, H, L, D]

    return attention


def _trade(tensor: torch.Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> torch.Tensor:
    traded: torch.Tensor = _AllToAll.apply(tensor, scatter, gather, group)  # type: ignore[no-untyped-call]
    return traded


class _AllToAll(torch.autograd.Function):
    """Cut along one dim, put together along another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dims, ctx.group = (scatter, gather), group
        return _exchange(tensor, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        scatter, gather = ctx.dims
        return _exchange(gradients[0], gather, scatter, ctx.group), None, None, None


def _exchange(tensor: torch.Tensor, scatter: int, gather: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), dim=scatter)).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=group)
    return torch.cat(list(got), dim=gather)
