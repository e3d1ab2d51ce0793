"""What divides the logits before the softmax: one number for all M rows, or one for each of T tokens."""

import torch

from verl_engine.batch.packed import PackedBatch

Temperature = float | torch.Tensor
"""One number, or [T] float32: at index t that of the distribution which token t is drawn from."""


def temperature_of(batch: PackedBatch, default: float) -> Temperature:
    """Return the field ``temperature`` of a micro-batch, [T], or the default where its sequences have none."""
    return batch.fields.get("temperature", default)


def rows_of(temperature: Temperature, positions: torch.Tensor | slice) -> Temperature:
    """Pick the temperatures of some tokens, [M] or the one number; `positions` are [M] int64, or a slice."""
    return temperature[positions] if isinstance(temperature, torch.Tensor) else temperature


def column(temperature: Temperature) -> Temperature:
    """Return what [M, V] logits are divided by: [M, 1], or the one number."""
    return temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature


def divide_(logits: torch.Tensor, temperature: Temperature) -> torch.Tensor:
    """Divide [M, V] logits in place, by [M] or one number."""
    if not isinstance(temperature, torch.Tensor) and temperature == 1.0:
        return logits
    return logits.div_(column(temperature))
