"""What a critic ends in, in place of the output layer."""

from typing import Final

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import linear

HF_NAMES: Final = {"output_layer.weight": "score.weight", "output_layer.bias": "score.bias"}
"""How transformers names the last layer of a model for token classification."""


class ValueHead(torch.nn.Module):
    """One number per token, computed alike on all tensor-parallel ranks.

    A fresh one is drawn as transformers draws it where a folder has none.
    """

    def __init__(self, transformer: TransformerConfig, std: float, seed: int, group: dist.ProcessGroup) -> None:
        """Draw the weight by a seed, with a standard deviation; the process's random numbers are left alone."""
        super().__init__()
        self._group = group
        self.sequence_parallel = transformer.sequence_parallel
        """Whether the ranks hold different tokens of the input, as in Megatron's output layer."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            weight = torch.empty(1, transformer.hidden_size, device="cpu").normal_(std=std)
        self.weight = torch.nn.Parameter(weight.to(transformer.params_dtype))
        self.bias = torch.nn.Parameter(torch.zeros(1, device="cpu", dtype=transformer.params_dtype))

    def forward(
        self, hidden: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return [t, 1, 1] for [t or this rank's part, 1, hidden size], and None for a bias yet to be added.

        Collectives: under sequence parallelism an all-gather; in the backward none: all ranks have the whole gradient.
        """
        assert weight is None, "a value head has a weight of its own"
        del runtime_gather_output
        if self.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self._group
            )
        return linear(hidden, self.weight, self.bias), None
