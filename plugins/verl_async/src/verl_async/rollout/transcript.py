"""What a running batch has drawn, kept as tensors until the end."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch


class Transcript:
    """Collects the tokens of each step, and sorts them by row once, when all is done."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._rows: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._tokens: list[torch.Tensor] = []
        self._log_probs: list[torch.Tensor] = []

    def append(self, rows: torch.Tensor, kept: torch.Tensor, tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Note one step.

        Args:
            rows: [B] int64; the row each token belongs to.
            kept: [B] bool; False where the row had ended before.
            tokens: [B] int64.
            log_probs: [B] float32.
        """
        self._rows.append(rows)
        self._kept.append(kept)
        self._tokens.append(tokens)
        self._log_probs.append(log_probs)

    def is_finite(self) -> bool:
        """Whether all log-probabilities are finite."""
        return all(bool(log_probs.isfinite().all()) for log_probs in self._log_probs)

    def by_row(self) -> list[tuple[list[int], list[float]]]:
        """Give each row's tokens and their log-probabilities, in the order drawn."""
        if not self._rows:
            return [([], []) for _ in range(self._num_rows)]
        kept = torch.cat(self._kept).cpu()
        rows = torch.cat(self._rows).cpu()[kept]
        order = rows.argsort(stable=True)
        counts = rows.bincount(minlength=self._num_rows).tolist()
        tokens = torch.cat(self._tokens).cpu()[kept][order].tolist()
        log_probs = torch.cat(self._log_probs).cpu()[kept][order].tolist()
        ends = list(accumulate(counts, initial=0))
        return [(tokens[start:end], log_probs[start:end]) for start, end in pairwise(ends)]
