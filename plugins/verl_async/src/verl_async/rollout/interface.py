"""What the async loop asks of a rollout engine. Embedded here; vLLM and others by the same interface.

A rollout engine is one process's blocking object; the floors above put it in a thread or an actor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import torch

    from verl_async.config import RolloutConfig

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Smallest set of likeliest tokens whose probability reaches top_p; 1 keeps all."""
    top_k: int = 0
    """Number of likeliest tokens kept; 0 keeps all."""
    stop_token_ids: tuple[int, ...] = ()
    """A drawn token among these ends the sequence and is kept as its last token."""


@dataclass(slots=True)
class Generation:
    """What was generated for one request so far; every list is as long as ``token_ids``."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Nats: log-probability of each drawn token under the full softmax(logits / temperature) of the weights that drew
    it (before top-p and top-k; at temperature 0, of softmax(logits))."""
    weight_versions: list[int] = field(default_factory=list)
    """Version of the weights that drew each token."""
    finish_reason: FinishReason = "interrupted"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to generate, or to go on with."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """Each request draws from its own stream, so results do not depend on what else is in the batch."""
    so_far: Generation | None = None
    """An interrupted generation to continue: its tokens count towards max_new_tokens, its stream goes on."""


class RolloutEngine(ABC):
    """Generates tokens and takes new weights in place. Only `interrupt` may be called from another thread.

    Subclasses are built as ``Engine(config, model_folder)``, and are named in the entry-point group
    ``verl_async.rollouts``.
    """

    version: int
    """Version of the weights in use; 0 for those of the model folder."""

    @abstractmethod
    def __init__(self, config: RolloutConfig, model_folder: Path) -> None:
        """Load the model of a Hugging Face folder."""

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate until every request stopped, reached its length, or `interrupt` was called.

        Returns:
            One generation a request, in order; includes the tokens of ``so_far``.
        """

    @abstractmethod
    def interrupt(self) -> None:
        """Make a running `generate` return after its current token. Thread-safe; without effect when idle."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy full tensors, in Hugging Face names, into the model; called once for each bucket between two `generate`.

        Raises:
            WeightsError: a name or shape that the model does not have.
        """

    @abstractmethod
    def commit_weights(self, version: int) -> None:
        """Check that every weight was loaded since the last commit; then `version` is in force.

        Raises:
            WeightsError: weights are missing, which are named.
        """
