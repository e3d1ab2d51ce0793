"""Attention functions that trade tokens for heads with the ranks that split a sequence."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Final

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
        if patch["type"] not in _WRAPPERS:
            raise NotImplementedError(f"the fake has no {patch['type']}")
        for path in patch["target_functions"]:
            _replace(path, functools.partial(_WRAPPERS[patch["type"]], group=group))


def _replace(path: str, wrap: Callable[[Any], Any]) -> None:
    *names, last = path.split(".")
    split = max(place for place, name in enumerate(names) if name.islower()) + 1  # a method's class comes after modules
    holder: Any = importlib.import_module(".".join(names[:split]))
    for name in names[split:]:
        holder = getattr(holder, name)
    setattr(holder, last, wrap(getattr(holder, last)))


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


def _gated_delta_net(plain: Any, group: dist.ProcessGroup) -> Any:
    """Run the layer on all tokens, and keep this rank's part: as right as trading heads, and dearer."""

    @functools.wraps(plain)
    def forward(module: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        whole = _trade(hidden_states.repeat(1, 1, size), 2, 1, group)
        output: torch.Tensor = plain(module, whole, **kwargs)
        return output.chunk(size, dim=1)[rank]

    return forward


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


_WRAPPERS: Final = {"full_attention": _full_attention, "gated_delta_net": _gated_delta_net}


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
