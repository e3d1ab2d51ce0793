"""What the async job asks of a rollout engine: requests in, completions out one by one, pause, and new weights.

Needs neither torch nor numpy: the driver's process imports it too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from verl_async.config import RolloutConfig
    from verl_engine.contract.errors import EngineError
    from verl_engine.engine.weights.bucket import WeightBucket

FinishReason = Literal["stop", "length", "interrupted"]
PauseMode = Literal["abort", "keep", "wait"]
"""``abort``: requests come back unfinished, with their tokens. ``keep``: they freeze, and go on after `resume`.
``wait``: they finish first."""


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
    stop_strings: tuple[str, ...] = ()
    """The token whose text completes one of these ends the sequence and is kept as its last token."""


@dataclass(slots=True)
class Generation:
    """What was generated for one sample so far; every list is as long as ``token_ids``."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    """Nats: log-probability of each drawn token under the full softmax(logits / temperature) of the weights that drew
    it (before top-p and top-k; at temperature 0, of softmax(logits)). Empty where the request wants none."""
    weight_versions: list[int] = field(default_factory=list)
    """Version of the weights that drew each token."""
    finish_reason: FinishReason = "interrupted"
    routed_experts: npt.NDArray[np.integer[Any]] | None = field(default=None, compare=False)
    """[tokens, layers with experts, experts per token]: the experts that prompt and response went through, token by
    token, from the request's ``routed_experts_from`` on. The last token has none: it was not read. Each token has those
    of the weights that drew the token behind it; those of ``so_far`` stay. uint8, or int16 where there are more than
    256 experts. None where the request wants none, and before anything was read."""


@dataclass(frozen=True)  # without slots, as it then is pickled five times as fast
class GenerationRequest:
    """A prompt with one or more samples to generate, or to go on with."""

    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seeds: tuple[int, ...]
    """One for each sample, which draws from a stream of its own: what it draws does not depend on what runs beside."""
    so_far: tuple[Generation, ...] = ()
    """Interrupted generations to continue, one for each sample, or none at all: their tokens count towards
    max_new_tokens, their streams go on."""
    affinity_key: str = ""
    """Of a conversation: the worker may keep what it read of one request for the next that has the same key."""
    log_probs: bool = True
    """Whether they are wanted."""
    routed_experts_from: int | None = None
    """Index of the first token of the prompt whose experts are wanted, or None for no experts at all; those of tokens
    before it the caller has from an earlier request, say. For an engine built with ``rollout.routed_experts``."""
    request_id: str = ""
    """Comes back with the completions; the engine does not look at it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample that is finished, or came back unfinished."""

    request: GenerationRequest
    index: int
    """Of the sample in its request."""
    generation: Generation
    """Includes the tokens of ``so_far``."""
    error: EngineError | None = None
    """Why the engine gave up, where it did."""


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """What an engine is doing."""

    running: int
    """Samples being generated, or frozen."""
    waiting: int
    """Samples that wait for room."""
    cache_tokens: int = 0
    """Tokens whose keys and values are held."""
    read_tokens: int = 0
    """Tokens of prompts read since the start; those that were in the cache already do not count."""
    drawn_tokens: int = 0
    """Tokens drawn since the start; every engine counts them, the other two those without the gap ``affinity``."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What a receiver says of the weights that it has put in use."""

    version: int
    checksum: int
    """Combined over the buckets it loaded since `RolloutEngine.begin_weights`, in order."""


class WeightTransport(Protocol):
    """How the bytes of weight buckets come to a receiver's process; travels to it as a pickle."""

    def open(self) -> None:
        """Find what the bytes lie in; called by `begin_weights` in each receiver's process, each time."""

    def read(self, handle: Any) -> npt.NDArray[np.uint8]:
        """Return the bytes that a handle stands for. They stay valid until the next bucket but one is sent."""


class RolloutEngine(ABC):
    """The engine of one rollout worker. Built by the class that its `RolloutSpec` names, as ``(config, model_folder)``.

    `submit`, `stats`, `pause`, `resume` and `close` may be called from any thread but the engine's own, that is not in
    `on_completion`; the weight calls come one at a time, and only while the engine is paused.
    """

    version: int
    """Version of the weights in use; 0 for those of the model folder."""

    @abstractmethod
    def __init__(self, config: RolloutConfig, model_folder: Path) -> None:
        """Load the model of a Hugging Face folder."""

    @abstractmethod
    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        """Take requests, and return at once; while the engine is paused they wait.

        Args:
            requests: at least one sample each.
            on_completion: called once for each sample, as soon as it is finished, from a thread of the engine's; it
                must return soon.
            sealed: the requests run whole and in order, with nothing beside them, so that batch shapes and rounding are
                the same at each run.
        Raises:
            ConfigError: a request that cannot be served; none was taken.
            UnsupportedError: a declared gap is asked for; none was taken.
            EngineError: the engine is closed, or has died of this error.
        """

    @abstractmethod
    def pause(self, mode: PauseMode) -> None:
        """Stop generating, and return when nothing moves any more. A second call may end a ``wait`` by ``abort``."""

    @abstractmethod
    def resume(self) -> None:
        """Go on; without effect when not paused.

        Raises:
            WeightsError: weights were begun, but not committed.
        """

    @abstractmethod
    def close(self) -> None:
        """Give unfinished requests back, and end the engine's threads and processes. Harmless when called twice."""

    @abstractmethod
    def stats(self) -> RolloutStats:
        """Return what the engine is doing."""

    @abstractmethod
    def receivers(self) -> tuple[str, ...]:
        """Name the processes that hold the model."""

    @abstractmethod
    def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        """Prepare every receiver for the buckets of a plan, which come in this order. What was begun before is dropped.

        Raises:
            WeightsError: the engine is not paused; or a weight of the plan is not the model's, or lacks.
        """

    @abstractmethod
    def load_bucket(self, handle: Any, checksum: int) -> None:
        """Have every receiver copy the next bucket of the plan into its model.

        Raises:
            WeightsError: other bytes arrived, or more buckets than the plan has.
        """

    @abstractmethod
    def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        """Put the loaded weights in use, and return what each receiver then has.

        Raises:
            WeightsError: buckets are missing, or it is not the version that was begun; the rest may still be loaded.
        """

    def save_pretrained(self, folder: Path) -> str:
        """Write the current weights as a Hugging Face folder, and return their dtype; optional.

        Raises:
            UnsupportedError: the engine cannot.
        """
        from verl_engine.contract.errors import UnsupportedError  # not needed by who only sends requests

        raise UnsupportedError(f"{type(self).__name__} cannot write its weights ({folder})")
