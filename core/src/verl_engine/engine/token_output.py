"""What the model says of each token.

Shape legend: T tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from verl_engine.contract.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

OutputName = Literal["log_probs", "entropy", "values", "routed_experts"]
"""A property of `TokenOutput`."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Numbers for each token of a micro-batch, as the engine's config asks for them; all 0 outside the loss.

    Experts alone are said of every token.

    A loss that reads what was not computed gets an error that names the setting.
    """

    given_log_probs: torch.Tensor | None = None
    given_entropy: torch.Tensor | None = None
    given_values: torch.Tensor | None = None
    given_routed_experts: torch.Tensor | None = None

    @property
    def log_probs(self) -> torch.Tensor:
        """[T] float32, nats: of token t given those before it, under softmax(logits / temperature)."""
        return _given(self.given_log_probs, "log-probs", "engine.head=language_model")

    @property
    def entropy(self) -> torch.Tensor:
        """[T] float32, nats: of the distribution that token t was drawn from, at the same temperature."""
        return _given(self.given_entropy, "entropy", "engine.entropy=value (or gradient)")

    @property
    def values(self) -> torch.Tensor:
        """[T] float32: the value of the state before token t, in which it was chosen."""
        return _given(self.given_values, "values", "engine.head=value")

    @property
    def routed_experts(self) -> torch.Tensor:
        """[T, layers with experts, experts per token] int32: through which token t went, in any order.

        Of a forward without gradient.
        """
        what = "routed experts, which only a forward without gradient says"
        return _given(self.given_routed_experts, what, "engine.router_replay=true")


def _given(tensor: torch.Tensor | None, what: str, setting: str) -> torch.Tensor:
    if tensor is None:
        raise UnsupportedError(f"the engine gives no {what}; set {setting}")
    return tensor
