"""How a model uses positions, and up to which length it treats packed sequences alike."""

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from verl_engine.contract.errors import ModelError

_ADVICE = {
    "longrope": "set short_factor to the values of long_factor",
    "dynamic": "set a rope_type whose frequencies stay, such as yarn or linear",
}


@dataclass(frozen=True, slots=True)
class RotaryLimit:
    """Up to which length a sequence's frequencies are its own."""

    model: str
    rope_type: str
    num_tokens: int

    def check(self, lengths: Sequence[int]) -> None:
        """Raise ModelError where a sequence is too long: it would change the log-probs of those beside it.

        On ranks that split it, each part would have other frequencies.
        """
        longest = max(lengths)
        if longest > self.num_tokens:
            raise ModelError(
                f"a sequence has {longest} tokens, and beyond {self.num_tokens} the rotary embedding of {self.model} "
                f"(rope_type={self.rope_type}) has other frequencies, for all sequences of the micro-batch: log-probs "
                f"would depend on how the batch is divided. In rope_parameters of the model folder's config.json "
                f"{_ADVICE[self.rope_type]}, or keep sequences within {self.num_tokens} tokens"
            )


class PositionUse:
    """Whether a model takes the positions it is given."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = type(model).__name__
        self._takes_any = "position_ids" in inspect.signature(model.forward).parameters
        # As transformers tells them: such a rotary embedding shares a head's dims out among several axes.
        self._takes_axes = any(hasattr(module, "mrope_section") for module in model.modules())

    def check(self, positions: torch.Tensor) -> None:
        """Raise ModelError for positions, [T] or [axes, T], that the model does not take, or not on several axes."""
        if not self._takes_any:
            raise ModelError(f"sequences have positions of their own, and {self._model} takes none")
        if positions.ndim > 1 and not self._takes_axes:
            raise ModelError(f"sequences have positions of {len(positions)} axes, and those of {self._model} have one")


def rotary_limit(model: PreTrainedModel) -> RotaryLimit | None:
    """Return the limit of a model, the lowest where layers differ; None where frequencies never change."""
    limits = [limit for module in model.modules() for limit in _limits(type(model).__name__, module)]
    return min(limits, key=lambda limit: limit.num_tokens, default=None)


def _limits(model: str, module: Any) -> Iterator[RotaryLimit]:
    """Yield those of one module; transformers' own have one type, or one for each type of layer."""
    types = getattr(module, "rope_type", None)
    for layer_type, rope_type in types.items() if isinstance(types, dict) else [(None, types)]:
        if not isinstance(rope_type, str):
            continue
        if "dynamic" in rope_type:
            yield RotaryLimit(model, "dynamic", module.original_max_seq_len)
        elif rope_type == "longrope":
            settings = module.config.rope_parameters
            settings = settings if layer_type is None else settings[layer_type]
            if settings["short_factor"] != settings["long_factor"]:
                yield RotaryLimit(model, rope_type, settings["original_max_position_embeddings"])
