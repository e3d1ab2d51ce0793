"""The rows still being generated: where each belongs, how far it may go, and what it draws with.

Shapes: B rows, S stop tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from verl_async.rollout.random_streams import uniform_numbers
from verl_async.rollout.sampling import RowSampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.rollout.interface import GenerationRequest

_BLOCK: Final = 256
"""Random numbers made at a time for each row."""


class ActiveRows:
    """Bookkeeping of a running batch, as tensors on the model's device: no Python work per row and token."""

    def __init__(self, requests: Sequence[GenerationRequest], device: torch.device) -> None:
        done = [len(request.so_far.token_ids) if request.so_far else 0 for request in requests]
        left = [request.sampling.max_new_tokens - num for request, num in zip(requests, done, strict=True)]
        stops = [request.sampling.stop_token_ids for request in requests]
        width = max(len(stop) for stop in stops)
        self.index_B = torch.arange(len(requests), device=device)
        """[B] int64: place of the row in the call's requests."""
        self.alive_B = torch.ones(len(requests), dtype=torch.bool, device=device)
        self.sampling = RowSampling.of([request.sampling for request in requests], device)
        self._num_left_B = torch.tensor(left, device=device)
        self._stop_BS = torch.tensor([[*stop, *[-1] * (width - len(stop))] for stop in stops], device=device).long()
        self._seeds = [request.seed for request in requests]
        self._next_number = done
        self._max_left = max(left)
        self._uniform_BN = torch.empty(len(requests), 0, dtype=torch.float64, device=device)
        self._column = 0

    def next_uniform(self) -> torch.Tensor:
        """[B] float64: the number of each row's stream that belongs to its next token."""
        if self._column == self._uniform_BN.shape[1]:
            rows = self.index_B.tolist()
            count = max(1, min(_BLOCK, self._max_left))
            starts = [self._next_number[row] for row in rows]
            numbers = uniform_numbers([self._seeds[row] for row in rows], starts, count)
            self._uniform_BN = torch.from_numpy(numbers).to(self.index_B.device)
            self._next_number = [num + count for num in self._next_number]
            self._max_left -= count
            self._column = 0
        self._column += 1
        return self._uniform_BN[:, self._column - 1]

    def end_finished(self, token_B: torch.Tensor) -> int:
        """Mark rows that end with this token, by a stop token or by their length; return the number still alive."""
        self._num_left_B = self._num_left_B - 1
        self.alive_B = self.alive_B & (self._num_left_B > 0)
        if self._stop_BS.shape[1]:
            self.alive_B = self.alive_B & (self._stop_BS != token_B[:, None]).all(1)
        return int(self.alive_B.sum())

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows only."""
        self.index_B = self.index_B[rows]
        self.alive_B = self.alive_B[rows]
        self.sampling = self.sampling.select(rows)
        self._num_left_B = self._num_left_B[rows]
        self._stop_BS = self._stop_BS[rows]
        self._uniform_BN = self._uniform_BN[rows]
