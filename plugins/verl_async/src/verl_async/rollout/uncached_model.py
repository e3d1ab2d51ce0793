"""A model whose state between tokens cannot be kept: each step reads its rows anew, from the first token on.

Shapes: B rows of equal length S, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from verl_async.rollout.routes import Experts, RouteRecorder


class UncachedModel:
    """As `CachedModel`, for rows of equal length; slower with each token."""

    can_join = False

    def __init__(self, model: PreTrainedModel, recorder: RouteRecorder | None = None) -> None:
        self._model = model
        self._recorder = recorder
        self.routes: list[Experts] = []
        """Of each row: the experts of all of its tokens; empty where nothing records them."""
        self._ids_BS = torch.empty(0, 0, dtype=torch.int64)
        self.num_read = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [self._ids_BS.shape[1]] * self._ids_BS.shape[0]

    def join(self, contexts: Sequence[tuple[int, ...]]) -> torch.Tensor:
        """Read one context a row and return the [B, V] logits after each."""
        self._ids_BS = torch.tensor(contexts, device=self._model.device)
        return self._forward()

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """Read one more token a row and return the [B, V] logits after it."""
        self._ids_BS = torch.cat([self._ids_BS, token_B[:, None]], dim=1)
        return self._forward()

    def select(self, rows: Sequence[int]) -> None:
        """Make row i what row rows[i] was; rows may be repeated or left out."""
        self._ids_BS = self._ids_BS[list(rows)]

    def _forward(self) -> torch.Tensor:
        self.num_read += self._ids_BS.numel()
        logits: torch.Tensor = self._model(input_ids=self._ids_BS, use_cache=False).logits
        if self._recorder is not None:
            self.routes = list(self._recorder.last(len(self._ids_BS)))
        return logits[:, -1]
