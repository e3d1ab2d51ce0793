"""Which part of each parameter this rank's optimizer updates, and where its float32 value lies."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """A contiguous part of one parameter: all of it, or with the distributed optimizer maybe less."""

    name: str
    """Of the parameter: number of its chunk, then its name there."""
    parameter: torch.nn.Parameter
    start: int
    """Its first element, counted in the flat parameter."""
    held: torch.Tensor
    """What torch's optimizer steps: a float32 master, or the parameter or a view of it."""
    inner: torch.optim.Optimizer
    """The one that has it."""

    @property
    def has_master(self) -> bool:
        """Whether the float32 value is a tensor of its own."""
        return self.held.dtype != self.parameter.dtype

    @property
    def model_value(self) -> torch.Tensor:
        """The elements of the live parameter, flat; on the CPU while that is there."""
        return self.parameter.detach().view(-1).narrow(0, self.start, self.held.numel())

    @property
    def master(self) -> torch.Tensor:
        """The live float32 elements, flat.

        Not `held` where that is a view of the parameter: its memory is gone while the parameter is on the CPU.
        """
        return self.held.detach().view(-1) if self.has_master else self.model_value

    def as_held(self, flat: torch.Tensor) -> torch.Tensor | tuple[int, torch.Tensor]:
        """Say where flat elements belong: give them the parameter's shape, or the number of the first."""
        is_whole = flat.numel() == self.parameter.numel()
        return flat.view(self.parameter.shape) if is_whole else (self.start, flat)


def find_slices(optimizers: Sequence[Any], names: Mapping[torch.nn.Parameter, str]) -> list[Slice]:
    """Go through Megatron's optimizers, the links of a ChainedOptimizer."""
    return [
        Slice(names[parameter], parameter, start, held, optimizer.optimizer)
        for optimizer in optimizers
        if not getattr(optimizer, "is_stub_optimizer", False)
        for parameter, start, held in _held_by(optimizer)
    ]


def _held_by(optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, int, torch.Tensor]]:
    """Yield each parameter that an optimizer has a part of, where that begins, and the part."""
    if isinstance(optimizer, DistributedOptimizer):
        groups = (
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        )
        for parameter, held in _pairs(groups):
            place = optimizer._get_model_param_range_map(parameter)["param"]  # noqa: SLF001 - nothing public says it
            yield parameter, place.start, held
    elif isinstance(optimizer, Float16OptimizerWithFloat16Params):
        groups = (
            (optimizer.float16_groups, optimizer.fp32_from_float16_groups),
            (optimizer.fp32_from_fp32_groups, optimizer.fp32_from_fp32_groups),
        )
        for parameter, held in _pairs(groups):
            yield parameter, 0, held
    else:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter


def _pairs(groups: Any) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    for models, shards in groups:
        yield from zip(chain(*models), chain(*shards), strict=True)
