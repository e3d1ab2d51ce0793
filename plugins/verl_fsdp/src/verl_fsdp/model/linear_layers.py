"""Which linear layers of a model can have an adapter: those that are called, and compute what a linear layer does."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VALUE_HEADS: Final = ("score", "classifier")
"""What transformers calls the last layer of its token classifiers. It is new in a critic, so it is trained whole."""
_SETUP: Final = ("__init__", "reset_parameters", "_init_weights")
_WEIGHT: Final = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)\b)")
"""What computes with a member's weight; asking for its dtype does not."""


def linear_layers(model: PreTrainedModel) -> tuple[list[str], dict[str, str]]:
    """Name the linear layers but output layer and value head, in the model's order.

    Returns:
        Those that can have an adapter; and those that cannot, with the reason.
    """
    output = model.get_output_embeddings()  # its weight may be the embedding's, and log-probs do not call it
    head = value_head(model)
    modules = dict(model.named_modules())
    adaptable, others = [], {}
    for name, module in modules.items():
        if module is output or name == head:
            continue
        parent, _, end = name.rpartition(".")
        kind = type(module)
        if kind.__name__ == "Conv1D":  # GPT-2's: a linear layer whose weight is transposed
            others[name] = "a Conv1D, whose weight is transposed"
        elif not isinstance(module, torch.nn.Linear):
            continue
        elif kind.forward is not torch.nn.Linear.forward:
            others[name] = f"a {kind.__name__}, whose forward is its own"
        elif end in weights_used(type(modules[parent])):
            others[name] = f"{type(modules[parent]).__name__} uses its weight without calling it"
        else:
            adaptable.append(name)
    return adaptable, others


def value_head(model: torch.nn.Module) -> str | None:
    """Name a critic's last layer; None for a language model."""
    return next((name for name in VALUE_HEADS if isinstance(getattr(model, name, None), torch.nn.Module)), None)


@cache
def weights_used(kind: type[torch.nn.Module]) -> frozenset[str]:
    """Name the members whose weight a class computes with itself, as fused kernels do: an adapter would not count."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for name, function in vars(base).items():
            if inspect.isfunction(function) and name not in _SETUP:
                with suppress(OSError, TypeError):  # there is no source to look at
                    found.update(_WEIGHT.findall(inspect.getsource(inspect.unwrap(function))))
    return frozenset(found)
