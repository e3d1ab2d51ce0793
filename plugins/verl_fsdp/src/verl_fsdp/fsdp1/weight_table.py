"""What a model's weights are called and how they look, noted before FSDP1 makes flat pieces of them."""

from dataclasses import dataclass
from typing import Self

import torch

_WRAPPER = "_fsdp_wrapped_module."


@dataclass(frozen=True, slots=True)
class WeightTable:
    """Meta tensors in place of full weights, under the names they had before the model was wrapped.

    Order is the model's; tied parameters come once.
    """

    parameters: dict[str, torch.Tensor]
    persistent_buffers: dict[str, torch.Tensor]
    """What a Hugging Face folder holds besides parameters."""

    @classmethod
    def of(cls, model: torch.nn.Module) -> Self:
        """Note a model that is not wrapped yet; its weights may be on the meta device already."""
        saved = model.state_dict(keep_vars=True)
        return cls(
            {name: _fake(parameter) for name, parameter in model.named_parameters()},
            {name: _fake(buffer) for name, buffer in model.named_buffers() if name in saved},
        )


def clean_name(name: str) -> str:
    """Take the wrappers out of the path of a parameter, buffer or module."""
    return name.replace(_WRAPPER, "")


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
