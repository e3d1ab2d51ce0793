"""A model with the keys and values of what its rows have read: prompts in, then one token a row at a time.

Shapes: U distinct contexts, B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, cast

import torch

from verl_async.rollout.kv_cache import has_only_full_attention, new_cache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

_MASK_GROWTH: Final = 256
"""Tokens of room added to the attention mask when it is full."""


class CachedModel:
    """One batch of contexts inside a model. Call under torch.inference_mode."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._cache = new_cache(model.config)
        self._accepted = inspect.signature(model.forward).parameters.keys()
        # A mask of four dims is taken as it is, which spares its construction in every step; that holds for models on
        # transformers' attention interface whose layers all see the same tokens.
        self._one_mask = has_only_full_attention(self._cache) and bool(model._supports_attention_backend)  # noqa: SLF001
        self._mask: torch.Tensor | None = None  # [B, room] bool; None where no row is padded
        self._num_tokens = 0
        self._position_B1: torch.Tensor

    def prefill(self, contexts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Read one context a row; equal contexts (the samples of a group) are computed once.

        Args:
            contexts: Token ids of each row, any lengths above zero.
        Returns:
            [B, V] logits after each context.
        """
        place = {context: i for i, context in enumerate(dict.fromkeys(contexts))}
        ids_US, mask_US = _pad_left(list(place))
        device = self._model.device
        self._num_tokens = ids_US.shape[1]
        mask_US = mask_US.to(device)
        has_padding = len({len(context) for context in place}) > 1
        logits = self._forward(
            ids_US.to(device), mask_US if has_padding else None, (mask_US.cumsum(1) - 1).clamp_(min=0)
        )
        self._position_B1 = mask_US.sum(1, keepdim=True)
        if has_padding:
            self._mask = _with_room(mask_US)
        if len(place) == len(contexts):
            return logits
        rows = torch.tensor([place[context] for context in contexts], device=device)
        self.select(rows)
        return logits[rows]

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """Read one more token a row and return the [B, V] logits after it."""
        self._num_tokens += 1
        logits = self._forward(token_B[:, None], self._current_mask(), self._position_B1)
        self._position_B1 = self._position_B1 + 1
        return logits

    def select(self, rows: torch.Tensor) -> None:
        """Make row i what row rows[i] was; rows may be repeated or left out."""
        # Beam search's call: unlike batch_select_indices every kind of cache layer has it.
        self._cache.reorder_cache(cast(torch.LongTensor, rows))
        self._position_B1 = self._position_B1[rows]
        if self._mask is not None:
            self._mask = self._mask[rows]

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """Run the model on [B, S] more tokens and return the [B, V] logits after the last."""
        arguments: dict[str, Any] = {
            "position_ids": positions,
            "past_key_values": self._cache,
            "cache_params": self._cache,
            "logits_to_keep": 1,
        }
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            use_cache=True,
            **{name: value for name, value in arguments.items() if name in self._accepted},
        )
        logits: torch.Tensor = output.logits
        return logits[:, -1]

    def _current_mask(self) -> torch.Tensor | None:
        if self._mask is None:
            return None
        if self._num_tokens > self._mask.shape[1]:
            self._mask = _with_room(self._mask)
        mask_BS = self._mask[:, : self._num_tokens]
        return mask_BS[:, None, None] if self._one_mask else mask_BS


def _pad_left(contexts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Align contexts at their ends: ids [U, S] int64 with 0 before them, mask [U, S] bool."""
    width = max(len(context) for context in contexts)
    ids = torch.tensor([[0] * (width - len(context)) + list(context) for context in contexts])
    num_tokens = torch.tensor([len(context) for context in contexts])
    return ids, torch.arange(width) >= (width - num_tokens)[:, None]


def _with_room(mask: torch.Tensor) -> torch.Tensor:
    """Extend a mask by tokens to come, which nothing hides."""
    return torch.cat([mask, mask.new_ones(mask.shape[0], _MASK_GROWTH)], dim=1)
