"""A norm in plain PyTorch for Megatron's layers."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import rms_norm


class RMSNorm(torch.nn.Module):
    """Root mean square norm that works under sequence parallelism; Megatron's own wrapper of torch's refuses it.

    There each rank norms its part of the tokens, so its weight's gradient is a part too: the mark makes Megatron sum
    them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        """Make a weight of ones.

        Args:
            config: of the whole model.
            hidden_size: numbers normed together.
            eps: added to their mean square.
        """
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Norm the last dim; any shape, dtype kept."""
        return rms_norm(hidden, self.weight.shape, self.weight, self.eps)
