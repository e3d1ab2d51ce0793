"""Whether a model's output layer may give something else than the logits of all tokens.

The layer is looked at in use: the model's own forward runs once with a fake for everything before the layer, and
one for the layer. What comes out at the end shows what the model does with its logits; nothing is computed, so it takes
no time, and a model on the meta device will do.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Literal

import torch
from transformers import PreTrainedModel

Ending = Literal["linear", "per token", "unknown"]
"""``linear``: the output is what a plain linear layer gives, as it is. ``per token``: a layer gives the logits, and
what comes then (soft caps, scales) treats each token alone. ``unknown``: anything else."""
_ROWS: Final = 2
_TOKENS: Final = 3
_MARKER: Final = (1, 5, 7)
"""A shape of logits that fits no other number above."""


def ending_of(model: PreTrainedModel) -> Ending:
    """Find out how a model, not sharded yet, comes from its last hidden states to its output; it stays unchanged."""
    layer = model.get_output_embeddings()
    trunk = model.base_model_prefix
    if layer is None or not isinstance(getattr(model, trunk, None), torch.nn.Module):
        return "unknown"
    device = next(model.parameters()).device
    marker = torch.zeros(_MARKER, device=device)
    seen: list[torch.Tensor] = []

    def fake(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden)
        return marker

    hidden = torch.zeros(_ROWS, _TOKENS, _width(model, layer), device=device)
    ids = torch.zeros(_ROWS, _TOKENS, dtype=torch.int64, device=device)
    try:
        with _replaced(model, trunk, _Trunk(hidden)), forward_of(layer, fake), torch.no_grad():
            found = model(input_ids=ids, use_cache=False).logits
    except Exception:  # noqa: BLE001 - it is not made for this, whatever it says
        return "unknown"
    if [tuple(tensor.shape[:2]) for tensor in seen] != [(_ROWS, _TOKENS)] or not isinstance(found, torch.Tensor):
        return "unknown"
    # A subclass, or a layer with an adapter, computes something else; and an in-place change leaves the same tensor.
    if type(layer) is torch.nn.Linear and found is marker and marker._version == 0:  # noqa: SLF001
        return "linear"
    return "per token" if tuple(found.shape) == _MARKER else "unknown"


@contextmanager
def forward_of(layer: torch.nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let a layer compute something else inside; its hooks, which gather its weights, run as usual."""
    own = vars(layer)
    before = {name: value for name, value in own.items() if name == "forward"}
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


class _TrunkOutput:
    """As transformers' outputs: by name or index; what nobody asked for is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, place: Any) -> Any:
        return (self.last_hidden_state,)[place]


class _Trunk(torch.nn.Module):
    """Gives the same hidden states for any input."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_args: Any, **_kwargs: Any) -> _TrunkOutput:
        return _TrunkOutput(self._hidden)


def _width(model: PreTrainedModel, layer: torch.nn.Module) -> int:
    width = getattr(layer, "in_features", None)
    return width if isinstance(width, int) else int(model.config.get_text_config().hidden_size)


@contextmanager
def _replaced(model: torch.nn.Module, name: str, module: torch.nn.Module) -> Iterator[None]:
    own = model._modules[name]  # noqa: SLF001 - setattr would move it to the end of the order
    model._modules[name] = module  # noqa: SLF001
    try:
        yield
    finally:
        model._modules[name] = own  # noqa: SLF001
