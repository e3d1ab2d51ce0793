"""The experts that tokens go through, gathered while they are read.

Shapes: U rows, Q tokens read of each, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from verl_engine.engine.routed_experts import ExpertLayers

if TYPE_CHECKING:
    import numpy.typing as npt
    from transformers import PreTrainedModel

    Experts = npt.NDArray[Any]
    """[tokens, L, k] uint8, or int16 where there are more than 256 experts."""

_TRIAL_TOKENS: Final = 16


class RouteRecorder:
    """Notes what the routers of a model choose in each forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take hold of a model, and try whether what is noted is what its tokens go through.

        Raises:
            ModelError: it has no layer with experts, or chooses them in another way than can be noted.
        """
        trial = ExpertLayers(model)
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        ids = (7 * torch.arange(_TRIAL_TOKENS, device=model.device) + 3).remainder(min(vocabulary, 997))[None]

        def forward() -> torch.Tensor:
            logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
            return logits.float()

        try:
            with torch.inference_mode():
                trial.require_followed(forward)
        finally:
            trial.release()
        self._layers = ExpertLayers(model)
        num_experts = max(layer.num_experts for layer in self._layers.layers)
        self._dtype = torch.uint8 if num_experts <= 2**8 else torch.int16

    def last(self, num_rows: int) -> Experts:
        """Return [U, Q, L, k]: the experts of what the last forward read, of U rows."""
        experts = self._layers.chosen().to(self._dtype)
        found: Experts = experts.view(num_rows, -1, *experts.shape[1:]).cpu().numpy()
        return found


class RowRoutes:
    """The experts of one row's tokens from one of them on, as they were when each was read first."""

    def __init__(self, first: int, known: Experts | None) -> None:
        """Begin with the token of this index; `known` has the experts of that one and of those behind it."""
        self.first = first
        self._content = bytearray()  # an array for each token would take more than its experts do
        self._like: Experts | None = None
        if known is not None:
            self.add(known, first + len(known))

    @property
    def end(self) -> int:
        """The index of the first token whose experts are not known."""
        return self.first + (len(self._content) // self._num_bytes if self._content else 0)

    @property
    def _num_bytes(self) -> int:
        """Of one token."""
        assert self._like is not None
        return self._like.dtype.itemsize * int(np.prod(self._like.shape[1:]))

    def add(self, experts: Experts, end: int) -> None:
        """Take the experts of the tokens in front of index `end`; what is known already stays."""
        begin = end - len(experts)
        assert begin <= self.end, f"the experts of tokens {self.end} to {begin} were never read"
        self._like = experts[:0]
        self._content += experts[self.end - begin :].tobytes()

    def cut(self, end: int) -> None:
        """Forget those of the tokens from index `end` on."""
        if self.end > end:
            del self._content[max(0, end - self.first) * self._num_bytes :]

    def array(self) -> Experts | None:
        """Copy what is known; None where nothing was ever read."""
        if self._like is None:
            return None
        return np.frombuffer(bytes(self._content), self._like.dtype).reshape(-1, *self._like.shape[1:])
