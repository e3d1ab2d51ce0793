"""One training sequence, in plain numpy: what travels between processes."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_engine.contract.errors import BatchError


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """Tokens of one sequence with what the loss needs to know of each.

    A value at index t speaks of token t itself: ``loss_mask[t]`` says whether the prediction of token t, from the
    tokens before it, counts in the loss. The first token is never predicted, so its mask is False.
    """

    token_ids: npt.NDArray[np.int64]
    """[L], 0 or more; L >= 1."""
    loss_mask: npt.NDArray[np.bool_]
    """[L]."""
    fields: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further per-token values by name, such as ``advantages`` or ``rollout_log_probs``; [L] or [L, ...], of any dtype.
    ``temperature`` has a meaning of its own: [L], of the distribution that token t was drawn from, in place of the one
    that a step or an inference is given. So has ``routed_experts``, for engines with ``router_replay``: [L, layers with
    experts, experts per token] whole numbers, the experts that token t goes through; -1 throughout for a token and
    layer where the router is to choose. And ``top_k_ids``: [L, k] whole numbers, ids whose log-probs in the place of
    token t are wanted too."""
    positions: npt.NDArray[np.int64] | None = None
    """[L], or [axes, L] for a model whose positions have several; by default 0, 1, 2 and so on."""

    def __post_init__(self) -> None:
        """Check ids, lengths, temperatures, and the first token's mask; a BatchError where one is wrong."""
        length = len(self.token_ids)
        if length == 0:
            raise BatchError("a sequence needs at least one token")
        if (lowest := self.token_ids.min()) < 0:
            raise BatchError(f"token_ids has {lowest}; ids are 0 or more")
        for name, array in self.fields.items():
            if array.shape[:1] != (length,):
                raise BatchError(f"{name} has shape {array.shape}, but the sequence has {length} tokens")
        exact = {"loss_mask": self.loss_mask, "temperature": self.fields.get("temperature", self.loss_mask)}
        if self.positions is not None:
            exact["positions, along its last dim,"] = self.positions[0] if self.positions.ndim > 1 else self.positions
        for name, array in exact.items():
            if array.shape != (length,):
                raise BatchError(f"{name} has shape {array.shape}, but the sequence has {length} tokens")
        if "temperature" in self.fields and not (self.fields["temperature"][self.loss_mask] > 0).all():
            raise BatchError("temperature is not above 0 for every token in the loss")
        ids = self.fields.get("top_k_ids")
        if ids is not None and (ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.min(initial=0) < 0):  # noqa: PLR2004
            raise BatchError(f"top_k_ids must be [L, k] integers, 0 or more; they are {ids.dtype}{list(ids.shape)}")
        if self.loss_mask[0]:
            raise BatchError("loss_mask[0] is True, but nothing comes before the first token to predict it from")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens count in the loss."""
        return int(self.loss_mask.sum())
