"""One training sequence, in plain numpy: what travels between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_engine.contract.errors import BatchError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class Sequence:
    """Tokens of one sequence with what the loss needs to know of each; every array is of length L.

    A value at index t speaks of token t itself: ``loss_mask[t]`` says whether the prediction of token t, from the
    tokens before it, counts in the loss. The first token is never predicted, so its mask is False.
    """

    token_ids: npt.NDArray[np.int64]
    """[L]; L >= 1."""
    loss_mask: npt.NDArray[np.bool_]
    """[L]."""
    fields: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Further per-token values by name, such as ``advantages`` or ``rollout_log_probs``; each [L]."""

    def __post_init__(self) -> None:
        """Check lengths and the first token's mask.

        Raises:
            BatchError: an array has another length than the tokens, or the first token is in the loss.
        """
        length = len(self.token_ids)
        if length == 0:
            raise BatchError("a sequence needs at least one token")
        arrays: dict[str, npt.NDArray[Any]] = {"loss_mask": self.loss_mask, **self.fields}
        for name, array in arrays.items():
            if array.shape != (length,):
                raise BatchError(f"{name} has shape {array.shape}, but the sequence has {length} tokens")
        if self.loss_mask[0]:
            raise BatchError("loss_mask[0] is True, but nothing comes before the first token to predict it from")

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        """How many tokens count in the loss."""
        return int(self.loss_mask.sum())
