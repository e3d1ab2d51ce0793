"""A sample that is being generated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from verl_async.rollout.interface import Completion, Generation
from verl_async.rollout.random_streams import uniform_numbers
from verl_async.rollout.routes import RowRoutes

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_async.rollout.interface import FinishReason, GenerationRequest
    from verl_async.rollout.stop_strings import StopStrings
    from verl_engine.contract.errors import EngineError

_BLOCK: Final = 64
"""Random numbers made at a time."""


@dataclass(slots=True, eq=False)
class Row:
    """One sample of a request, with what it has drawn."""

    request: GenerationRequest
    index: int
    on_completion: Callable[[Completion], None]
    stop_strings: StopStrings | None
    generation: Generation = field(init=False)
    routes: RowRoutes | None = field(init=False, default=None)
    """Where they are wanted."""
    _stops: frozenset[int] = field(init=False)
    _numbers: list[float] = field(init=False, default_factory=list)
    _first_number: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Copy what was generated so far, as the caller keeps the original."""
        old = self.request.so_far[self.index] if self.request.so_far else Generation()
        self.generation = Generation(list(old.token_ids), list(old.log_probs), list(old.weight_versions))
        self._stops = frozenset(self.request.sampling.stop_token_ids)
        if self.request.routed_experts_from is not None:
            self.routes = RowRoutes(self.request.routed_experts_from, old.routed_experts)

    @property
    def context(self) -> tuple[int, ...]:
        """What is read before the next token is drawn."""
        return (*self.request.prompt_ids, *self.generation.token_ids)

    @property
    def num_tokens(self) -> int:
        """Length of the context."""
        return len(self.request.prompt_ids) + len(self.generation.token_ids)

    def next_uniform(self) -> float:
        """Return the number of the sample's stream that belongs to its next token."""
        place = len(self.generation.token_ids) - self._first_number
        if not 0 <= place < len(self._numbers):
            self._first_number = len(self.generation.token_ids)
            seed = self.request.seeds[self.index]
            self._numbers = uniform_numbers([seed], [self._first_number], _BLOCK)[0].tolist()
            place = 0
        return self._numbers[place]

    def append(self, token_id: int, log_prob: float, version: int) -> bool:
        """Take the next token; return whether the sample has ended."""
        generation = self.generation
        generation.token_ids.append(token_id)
        generation.weight_versions.append(version)
        if self.request.log_probs:
            generation.log_probs.append(log_prob)
        return self.is_finished()

    def is_finished(self) -> bool:
        """Tell from the tokens whether the sample is at its end, and note why."""
        self.generation.finish_reason = self._finish_reason()
        return self.generation.finish_reason != "interrupted"

    def _finish_reason(self) -> FinishReason:
        tokens = self.generation.token_ids
        if tokens and tokens[-1] in self._stops:
            return "stop"
        if self.stop_strings is not None and self.stop_strings.is_complete(tokens):
            return "stop"
        return "length" if len(tokens) >= self.request.sampling.max_new_tokens else "interrupted"

    def hand_back(self, error: EngineError | None = None) -> None:
        """Give the sample to who asked for it, finished or not."""
        if self.routes is not None:
            self.routes.cut(self.num_tokens - 1)
            self.generation.routed_experts = self.routes.array()
        self.on_completion(Completion(self.request, self.index, self.generation, error))
