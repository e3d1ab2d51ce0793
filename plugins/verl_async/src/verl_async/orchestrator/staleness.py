"""How many prompts may be rolled out ahead of training."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_async.config import AsyncTrainingConfig


def prompts_between_syncs(config: AsyncTrainingConfig, mini_batch_size: int) -> int:
    """Return (1 + staleness_threshold) * trigger_parameter_sync_step * require_batches * mini_batch_size, rounded down.

    Source: the fully-async trainer of verl, whose users know these parameters.
    """
    per_sync = config.trigger_parameter_sync_step * config.require_batches * mini_batch_size
    # A threshold such as 0.1 is not exact in binary: 1.1 * 10 must not become 10.
    return math.floor((1 + config.staleness_threshold) * per_sync + 1e-9)


class StalenessBudget:
    """Grants prompts to the dispatcher so that never too many samples wait that older weights made.

    At a weight sync, what was started and not yet trained on is left over. Until the next one, so many more may be
    started that both together do not exceed `limit`. With a threshold of 0 that is just what training needs next.
    """

    def __init__(self, limit: int, total: int) -> None:
        """Start with nothing: before the first sync the rollout workers do not have the trainer's weights.

        Args:
            limit: prompts started and not trained on, as of the last sync; see `prompts_between_syncs`.
            total: prompts of the whole job: none is rolled out that would not be trained on.
        """
        self._limit = limit
        self._total = total
        self._allowed = 0
        """Prompts that may be started until the next sync, those started before included."""
        self._started = 0
        self._trained = 0
        self._changed = asyncio.Event()

    @property
    def num_started(self) -> int:
        """Prompts granted so far."""
        return self._started

    @property
    def available(self) -> int:
        """Prompts that may be started now."""
        return self._allowed - self._started

    @property
    def exhausted(self) -> bool:
        """Whether every prompt of the job was started."""
        return self._started >= self._total

    async def acquire(self, at_most: int | None = None) -> range:
        """Wait until prompts may be started, and take some.

        Bounded by the trainer's own time limits: without them it syncs, fails or ends, and each of these ends the wait.

        Args:
            at_most: that many; by default all that may be started.
        Returns:
            Numbers of prompt instances; empty once the job needs no more.
        """
        while not self.available and not self.exhausted:
            self._changed.clear()
            await self._changed.wait()
        first = self._started
        self._started += self.available if at_most is None else min(at_most, self.available)
        return range(first, self._started)

    def trained(self, num_prompts: int) -> None:
        """Note that prompts were taken out of the queue for training."""
        self._trained += num_prompts

    def synced(self) -> None:
        """Note that the rollout workers have the trainer's weights; grants what that allows."""
        self._allowed = min(self._trained + self._limit, self._total)
        self._changed.set()
