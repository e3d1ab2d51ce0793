"""What a loss reports besides itself, and how it is reduced over micro-batches and ranks to one number each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.distributed as dist

from verl_engine.contract.choices import require_choice
from verl_engine.contract.errors import BatchError
from verl_engine.engine.process_group import DataParallel

Reduction = Literal["sum", "mean", "max", "min"]
Key = tuple[str, str]
"""A metric's name, and what is kept of it: ``sum``, ``max``, ``min`` (negated), or ``mean`` with ``count``."""
_HIGHEST: Final = ("max", "min")


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a micro-batch. A loss function that returns a plain tensor means a ``sum``."""

    value: torch.Tensor
    """Scalar."""
    reduction: Reduction = "sum"
    """``sum``: divided by the normaliser, like the loss. ``mean``: sum of the values over sum of the counts. ``max``,
    ``min``: over all micro-batches that have loss tokens."""
    count: torch.Tensor | float = 1.0
    """For ``mean``: how many things `value` is the sum over."""

    def __post_init__(self) -> None:
        """Refuse another reduction, with a BatchError."""
        require_choice("a metric's reduction", self.reduction, Reduction, error=BatchError)


class Totals:
    """Loss and metrics of several micro-batches, added up on one rank."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        """Sum, without gradient."""
        self._kept: dict[Key, torch.Tensor] = {}

    @property
    def keys(self) -> tuple[Key, ...]:
        """What there is besides the loss, in order."""
        return tuple(sorted(self._kept))

    def add(self, loss: torch.Tensor, metrics: Mapping[str, torch.Tensor | Metric], *, has_loss_tokens: bool) -> None:
        """Add a micro-batch. One without loss tokens leaves means, highest and lowest values as they are."""
        self.loss = self.loss + loss.detach()
        for name, given in metrics.items():
            metric = given if isinstance(given, Metric) else Metric(given)
            if metric.reduction in _HIGHEST:
                value = metric.value if metric.reduction == "max" else -metric.value
                self._add((name, metric.reduction), value if has_loss_tokens else -torch.inf)
            elif metric.reduction == "mean":
                self._add((name, "mean"), metric.value if has_loss_tokens else 0.0)
                self._add((name, "count"), metric.count if has_loss_tokens else 0.0)
            else:
                self._add((name, "sum"), metric.value)

    def _add(self, key: Key, value: torch.Tensor | float) -> None:
        own = value.detach().to(self.loss) if isinstance(value, torch.Tensor) else torch.full_like(self.loss, value)
        if key in self._kept:
            former = self._kept[key]
            own = torch.maximum(former, own) if key[1] in _HIGHEST else former + own
        self._kept[key] = own

    def vector(self, keys: tuple[Key, ...]) -> torch.Tensor:
        """Return [1 + K] float32: the loss and what is kept under each key, 0 where there is nothing."""
        return torch.stack([self.loss, *(self._kept.get(key, torch.zeros_like(self.loss)) for key in keys)])

    def take(self, keys: tuple[Key, ...], vector: torch.Tensor) -> None:
        """Replace everything by a `vector`, such as another rank's."""
        self.loss, *kept = vector.unbind()
        self._kept = dict(zip(keys, kept, strict=True))

    def reduced(self, data_parallel: DataParallel, normalizer: float) -> tuple[float, dict[str, float]]:
        """Return loss and metrics of the global batch, sums over the normaliser; a mean over nothing is NaN.

        Collectives: an all-reduce, and a second one where there is a ``max`` or ``min``.
        """
        sums = tuple(key for key in self.keys if key[1] not in _HIGHEST)
        highest = tuple(key for key in self.keys if key[1] in _HIGHEST)
        found = self.vector((*sums, *highest))
        if data_parallel.size > 1:
            dist.all_reduce(found[: 1 + len(sums)], group=data_parallel.group)
            if highest:
                dist.all_reduce(found[1 + len(sums) :], op=dist.ReduceOp.MAX, group=data_parallel.group)
        loss, *values = found.tolist()
        kept = dict(zip((*sums, *highest), values, strict=True))
        metrics = {
            name: _result(name, kind, value, kept, normalizer)
            for (name, kind), value in kept.items()
            if kind != "count"
        }
        return loss / normalizer, dict(sorted(metrics.items()))


def _result(name: str, kind: str, value: float, kept: Mapping[Key, float], normalizer: float) -> float:
    if kind == "mean":
        count = kept[name, "count"]
        return value / count if count else float("nan")
    return value / normalizer if kind == "sum" else (-value if kind == "min" else value)
