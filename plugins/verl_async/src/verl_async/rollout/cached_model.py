"""A model over transformers' own cache, for those whose layers are not of attention alone: one batch at a time.

Shapes: U distinct contexts, B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from transformers import DynamicCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from verl_async.rollout.routes import Experts, RouteRecorder

_MASK_GROWTH: Final = 256
"""Tokens of room added to the attention mask when it is full."""


class CachedModel:
    """One batch of contexts inside a model; the next comes when it is empty. Call under torch.inference_mode."""

    can_join = False

    def __init__(self, model: PreTrainedModel, recorder: RouteRecorder | None = None) -> None:
        self._model = model
        self._recorder = recorder
        self.routes: list[Experts] = []
        """Of each row: the experts of what was read last; empty where nothing records them."""
        self._accepted = inspect.signature(model.forward).parameters.keys()
        self._mask: torch.Tensor | None = None  # [B, room] bool; None where no row is padded
        self._cache: DynamicCache
        self._num_tokens = 0
        self._position_B1: torch.Tensor
        self.lengths: list[int] = []
        """Tokens held of each row, padding not counted."""
        self.num_read = 0
        """Tokens of prompts read since the start."""

    def join(self, contexts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Read one context a row; equal contexts (the samples of a group) are computed once.

        Args:
            contexts: token ids of each row, any lengths above zero.
        Returns:
            [B, V] logits after each context.
        """
        place = {context: i for i, context in enumerate(dict.fromkeys(contexts))}
        self.num_read += sum(map(len, place))
        self.lengths = [len(context) for context in place]
        self._cache, self._mask = DynamicCache(config=self._model.config), None
        ids_US, mask_US = _pad_left(list(place))
        device = self._model.device
        self._num_tokens = ids_US.shape[1]
        mask_US = mask_US.to(device)
        has_padding = len(set(self.lengths)) > 1
        logits = self._forward(
            ids_US.to(device), mask_US if has_padding else None, (mask_US.cumsum(1) - 1).clamp_(min=0)
        )
        self._position_B1 = mask_US.sum(1, keepdim=True)
        if has_padding:
            self._mask = _with_room(mask_US)
        self.routes = [part[-length:] for part, length in zip(self.routes, self.lengths, strict=False)]
        if len(place) == len(contexts):
            return logits
        rows = [place[context] for context in contexts]
        self.select(rows)
        self.routes = [self.routes[row] for row in rows] if self.routes else []
        return logits[rows]

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """Read one more token a row and return the [B, V] logits after it."""
        self._num_tokens += 1
        self.lengths = [length + 1 for length in self.lengths]
        logits = self._forward(token_B[:, None], self._current_mask(), self._position_B1)
        self._position_B1 = self._position_B1 + 1
        return logits

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row rows[i] was; rows may be repeated or left out."""
        self.lengths = [self.lengths[row] for row in rows]
        if not rows:
            return
        index = torch.tensor(rows, device=self._model.device)
        # Beam search's call: unlike batch_select_indices every kind of cache layer has it.
        self._cache.reorder_cache(cast(torch.LongTensor, index))
        self._position_B1 = self._position_B1[index]
        if self._mask is not None:
            self._mask = self._mask[index]

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
        if self._recorder is not None:
            self.routes = list(self._recorder.last(len(ids)))
        return logits[:, -1]

    def _current_mask(self) -> torch.Tensor | None:
        if self._mask is None:
            return None
        if self._num_tokens > self._mask.shape[1]:
            self._mask = _with_room(self._mask)
        return self._mask[:, : self._num_tokens]


def _pad_left(contexts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Align contexts at their ends: ids [U, S] int64 with 0 before them, mask [U, S] bool."""
    width = max(len(context) for context in contexts)
    ids = torch.tensor([[0] * (width - len(context)) + list(context) for context in contexts])
    num_tokens = torch.tensor([len(context) for context in contexts])
    return ids, torch.arange(width) >= (width - num_tokens)[:, None]


def _with_room(mask: torch.Tensor) -> torch.Tensor:
    """Extend a mask by tokens to come, which nothing hides."""
    return torch.cat([mask, mask.new_ones(mask.shape[0], _MASK_GROWTH)], dim=1)
