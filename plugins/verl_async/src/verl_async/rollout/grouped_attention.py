"""Attention of one token a row without copying keys and values for each query head that shares them.

transformers repeats them wherever there is a mask, which in every step copies the whole cache of a model with grouped
query heads.

Shapes: B rows, H query heads, K key heads, E tokens attended to, D head dim.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

_NAME: Final = "verl_async_grouped"


def use_grouped_attention(model: PreTrainedModel) -> bool:
    """Have a model that would use transformers' sdpa use this, where it asks transformers for its attention.

    The caller must try it: some models do something else where the name of their attention is not ``sdpa``.

    Returns:
        Whether the model uses it now; `give_back_attention` undoes it.
    """
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:  # noqa: SLF001
        return False
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    return True


def give_back_attention(model: PreTrainedModel) -> None:
    """Let a model use transformers' own attention again."""
    model.set_attn_implementation("sdpa")


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model use transformers' own attention inside."""
    is_grouped = model.config._attn_implementation == _NAME  # noqa: SLF001
    if is_grouped:
        give_back_attention(model)
    try:
        yield
    finally:
        if is_grouped:
            use_grouped_attention(model)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as `sdpa_attention_forward`; returns [B, 1, H, D] for one query token."""
    num_rows, num_heads, num_queries, _ = query.shape
    num_groups = key.shape[1]
    one_mask = attention_mask is None or attention_mask.shape[1] == 1
    if num_queries > 1 or num_heads == num_groups or not one_mask or arguments.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    # The query heads of a group become queries of one head: [B, K, H / K, D].
    grouped = query.reshape(num_rows, num_groups, num_heads // num_groups, -1)
    found = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=arguments.get("scaling")
    )
    return found.reshape(num_rows, 1, num_heads, -1), None
