"""Which linear layers of a model can have an adapter: those that are called, and compute what a linear layer does."""

import copy
import inspect
import re
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from typing import Any, Final, cast

import torch
from transformers import PreTrainedModel

VALUE_HEADS: Final = ("score", "classifier")
"""What transformers calls the last layer of its token classifiers. It is new in a critic, so it is trained whole."""
_SETUP: Final = ("__init__", "reset_parameters", "_init_weights")
_WEIGHT: Final = re.compile(r"self\.(\w+)\.weight\b(?!\.(?:dtype|device|shape|size)\b)")
"""What computes with a member's weight; asking for its dtype does not."""


def linear_layers(model: PreTrainedModel) -> tuple[list[str], dict[str, str]]:
    """Name, in the model's order, linear layers that can have an adapter; and those that cannot, with the reason.

    The output layer and a value head are left out.
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
        elif not _is_linear(module):
            others[name] = f"a {kind.__name__}, whose forward is its own"
        elif end in weights_used(modules[parent]):
            others[name] = f"{type(modules[parent]).__name__} uses its weight without calling it"
        else:
            adaptable.append(name)
    return adaptable, others


def value_head(model: torch.nn.Module) -> str | None:
    """Name a critic's last layer; None for a language model."""
    return next((name for name in VALUE_HEADS if isinstance(getattr(model, name, None), torch.nn.Module)), None)


def _is_linear(module: torch.nn.Linear) -> bool:
    """Whether a layer computes what a linear layer does; one with a forward of its own is tried, by random numbers."""
    if type(module).forward is torch.nn.Linear.forward:
        return True
    random = torch.Generator().manual_seed(0)
    probe = copy.copy(module)  # with other weights: on most ranks these are on the meta device
    probe._parameters = {  # noqa: SLF001 - assigning a parameter would change the module's own
        name: held if held is None else torch.nn.Parameter(torch.rand(held.shape, generator=random, device="cpu"))
        for name, held in module._parameters.items()  # noqa: SLF001
    }
    inputs = torch.rand(2, 3, module.in_features, generator=random, device="cpu")
    try:
        with torch.no_grad():
            found = probe(inputs)
            expected = torch.nn.functional.linear(inputs, probe.weight, probe.bias)
    except Exception:  # noqa: BLE001 - it wants something else than a linear layer does
        return False
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected)


def weights_used(module: torch.nn.Module) -> frozenset[str]:
    """Name the members whose weight a module computes with itself, as fused kernels do: an adapter would not count."""
    return _weights_used_by(cast("Hashable", type(module)))


@cache
def _weights_used_by(kind: Any) -> frozenset[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch":
            continue
        for name, function in vars(base).items():
            if inspect.isfunction(function) and name not in _SETUP:
                with suppress(OSError, TypeError):  # there is no source to look at
                    found.update(_WEIGHT.findall(inspect.getsource(inspect.unwrap(function))))
    return frozenset(found)
