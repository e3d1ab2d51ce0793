"""Prompts in the order of training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from verl_async.data.order import Mix
from verl_async.orchestrator.samples import PromptInstance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.data.order import EpochOrder, MixedOrder
    from verl_async.orchestrator.samples import EncodedPrompt


@dataclass(slots=True)
class PromptSource:
    """Gives each prompt instance of the job its row, epoch after epoch."""

    prompts: Sequence[EncodedPrompt]
    seed: int
    """Of the order and of the sampling."""
    shuffle: bool
    mix: Mix | None = None
    """How the rows of several files are drawn; by default all alike."""
    _order: EpochOrder | MixedOrder = field(init=False)

    def __post_init__(self) -> None:
        """Start the first epoch."""
        self._order = (self.mix or Mix((len(self.prompts),))).order(self.shuffle, self.seed)

    def draw(self, number: int) -> PromptInstance:
        """Make the next instance; `number` must be how many were made so far."""
        assert number == self._order.position, "instances are made in order"
        return PromptInstance(number, self.prompts[next(self._order)])
