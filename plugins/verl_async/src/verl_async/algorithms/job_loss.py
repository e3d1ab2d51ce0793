"""The loss of a job: the one that it names, and what its settings add to it. Travels to the trainer ranks as text."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_async.algorithms.columns import REF_LOG_PROBS
from verl_async.algorithms.kl import KlEstimator, kl_estimate
from verl_async.algorithms.names import LOSSES
from verl_async.references import load
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from verl_async.references import Loaded
    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import LossFn, TokenOutput
    from verl_engine.engine.metrics import Metric


@dataclass(frozen=True, slots=True)
class JobLoss:
    """A `LossFn`. The loss that it names is imported where it is first called: on a rank, after its preparation."""

    name: str
    """Built in, or a reference."""
    settings: str
    """For its ``Config``, as JSON."""
    path: str
    """File of its module, or folder of its package: looked for by other processes of this machine."""
    columns: tuple[str, ...]
    """What it reads, and what the KL does."""
    kl_estimator: KlEstimator | None = None
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[Tensor, Mapping[str, Tensor | Metric]]:
        """Compute loss + kl_coefficient * KL - entropy_coefficient * entropy, summed over the tokens in the loss.

        Returns:
            Scalar float32; and the loss's metrics, ``kl`` and, where the engine gives it, ``entropy``: both in nats,
            means over the tokens in the loss.
        Raises:
            ConfigError: the loss gave no scalar and mapping.
        Collectives: none. Gradient: through log-probs and entropy.
        """
        from verl_engine.engine.metrics import Metric

        at = batch.loss_positions
        if not batch.fields:  # of a micro-batch without sequences, which only keeps the ranks in step
            zeros_T = batch.loss_mask.float()
            batch = dataclasses.replace(batch, fields=dict.fromkeys(self.columns, zeros_T))
        loss, metrics = self._call(output, batch)
        if self.kl_estimator is not None:
            kl = kl_estimate(output.log_probs[at], batch.fields[REF_LOG_PROBS][at], self.kl_estimator).sum()
            loss = loss + self.kl_coefficient * kl
            metrics["kl"] = Metric(kl.detach(), "mean", len(at))
        if output.given_entropy is not None:
            entropy = output.entropy[at].sum()
            loss = loss - self.entropy_coefficient * entropy
            metrics["entropy"] = Metric(entropy.detach(), "mean", len(at))
        return loss, metrics

    def _call(self, output: TokenOutput, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor | Metric]]:
        result: Any = _loaded(self.name, self.settings, self.path)(output, batch)
        try:
            loss, metrics = result
            if loss.dim() == 0:
                return loss, dict(metrics)
            what = f"a loss of shape {list(loss.shape)}"
        except (TypeError, ValueError, AttributeError):
            what = f"a {type(result).__name__}"
        raise ConfigError(
            f"algorithm.loss={self.name} gave {what}; expected a scalar, the sum over the tokens in the loss, and a "
            "mapping of metrics"
        )


def load_loss(name: str, settings: Mapping[str, Any]) -> Loaded:
    """Find the loss that a job names.

    Args:
        name: built in, or a reference.
        settings: for its ``Config``.
    Raises:
        ConfigError: it cannot be imported or made, or cannot be called as a loss.
    """
    loaded = load(name, LOSSES, settings, "algorithm.loss")
    require_call(loaded.made, ("output", "batch"), f"algorithm.loss={name}")
    return loaded


def require_call(found: object, arguments: tuple[str, ...], place: str) -> None:
    """Refuse what cannot be called with so many arguments, or would have to be awaited.

    Raises:
        ConfigError: says so.
    """
    expected = f"expected ({', '.join(arguments)})"
    call = getattr(found, "__call__", None)  # noqa: B004 - looked at, not asked for
    if not callable(found) or inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(call):
        raise ConfigError(f"{place}: cannot be called, or is async; {expected}")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{place}: takes {inspect.signature(found)} ({error}); {expected}") from error


@cache
def _loaded(name: str, settings: str, path: str) -> LossFn:
    """Once in a process, so that a loss of a class may keep something."""
    folder = str(Path(path).parent)
    if folder not in sys.path:  # last: it must not hide an installed package
        sys.path.append(folder)
    loss: LossFn = load_loss(name, json.loads(settings)).made
    return loss
