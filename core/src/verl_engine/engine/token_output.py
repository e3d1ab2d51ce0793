"""What the model says of each token.

Shape legend: T tokens of a micro-batch, M rows of logits, k chosen ids, N = 1 + k, F numbers per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.linear_log_probs import Entropy

OutputName = Literal["log_probs", "entropy", "values", "routed_experts", "top_k_log_probs", "top_k_ids"]
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
    given_top_k_log_probs: torch.Tensor | None = None
    given_top_k_ids: torch.Tensor | None = None

    @classmethod
    def of(cls, numbers_TF: torch.Tensor, columns: Mapping[str, int]) -> Self:
        """Name the numbers of a micro-batch.

        Args:
            numbers_TF: float32, 0 outside the loss.
            columns: fields of this class, and how many of the F are theirs, in order; see `columns_of`.
        """
        parts = dict(zip(columns, numbers_TF.split(list(columns.values()), dim=1), strict=True))
        named = {name: part if "top_k" in name else part[:, 0] for name, part in parts.items()}
        if "given_top_k_ids" in named:
            named["given_top_k_ids"] = named["given_top_k_ids"].long()
        return cls(**named)

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

    @property
    def top_k_log_probs(self) -> torch.Tensor:
        """[T, k] float32, nats: as `log_probs`, of other ids in the place of token t, with gradient to all of them.

        The ids are those of the sequences' field ``top_k_ids``, or `top_k_ids` below. [T, 0] where a micro-batch has
        no sequences.
        """
        return _given(
            self.given_top_k_log_probs, "top-k log-probs", "top_k_ids of the sequences, or top_k of the batch"
        )

    @property
    def top_k_ids(self) -> torch.Tensor:
        """[T, k] int64: the most likely ids in the place of token t, in descending order; of ties the lowest first."""
        return _given(self.given_top_k_ids, "top-k ids", "top_k of the batch")


def columns_of(batch: PackedBatch, entropy: Entropy) -> dict[str, int]:
    """Say which fields of `TokenOutput` a language model gives for a micro-batch, and how many columns each has."""
    chosen = batch.fields.get("top_k_ids")
    num_chosen = batch.top_k or (0 if chosen is None else chosen.shape[1])
    columns = {"given_log_probs": 1, "given_top_k_log_probs": num_chosen, "given_top_k_ids": batch.top_k}
    # A loss reads those of a micro-batch without sequences too, which has no fields.
    if batch.fields or batch.loss_positions.numel():
        columns = {name: number for name, number in columns.items() if number}
    return columns | ({} if entropy == "off" else {"given_entropy": 1})


def numbers_of(
    log_probs_MN: torch.Tensor, entropy_M: torch.Tensor | None, ids_MN: torch.Tensor, top_k: int
) -> torch.Tensor:
    """Lay [M, F] numbers side by side, as `columns_of` says.

    The last `top_k` ids are among them, as floats that are exact up to 2**24: all is brought together over ranks at
    once.
    """
    ids = ids_MN[:, ids_MN.shape[1] - top_k :].to(log_probs_MN.dtype)
    return torch.cat([log_probs_MN, ids, *([] if entropy_M is None else [entropy_M[:, None]])], dim=1)


def _given(tensor: torch.Tensor | None, what: str, setting: str) -> torch.Tensor:
    if tensor is None:
        raise UnsupportedError(f"the engine gives no {what}; set {setting}")
    return tensor
