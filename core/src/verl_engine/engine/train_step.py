"""One optimizer step over a global batch: the accumulation contract, once for all backends.

The loss function returns the SUM over tokens of a micro-batch. The number of loss tokens is counted once, over all
micro-batches and all data-parallel ranks. So the gradient equals d(sum / num_tokens) of the global batch, however it is
split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verl_engine.contract.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.contract.optimizer_step import OptimizerStep
    from verl_engine.engine.base import DataParallel, Engine, LossFn
    from verl_engine.host.backend_host import BackendHost


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a training step did; equal on every data-parallel rank."""

    loss: float
    """Mean over the global batch's loss tokens."""
    metrics: dict[str, float]
    """The loss function's metrics, each the mean over the same tokens. `EngineWorker` adds the figures of observers,
    which are those of its own rank."""
    num_loss_tokens: int
    num_tokens: int
    """All tokens that went through the model, on all ranks."""
    num_micro_batches: int
    """On each rank."""
    optimizer: OptimizerStep


def train_step(
    host: BackendHost, engine: Engine, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, temperature: float = 1.0
) -> StepReport:
    """Compute the gradient of a global batch and step the optimizer.

    Args:
        host: of the backend that made the engine.
        engine: in train mode when it returns.
        micro_batches: this rank's; every rank brings the same number, at least one.
        loss_fn: see `LossFn`; the same on every rank.
        temperature: divides the logits before the softmax.
    Raises:
        BatchError: the ranks bring different numbers of micro-batches, or no token is in the loss.
        Exception: whatever the model or the loss raises; the gradient is forgotten first, so the next step is right.
    Collectives: over the data-parallel group one all-reduce of counts and one of the loss, besides the backend's own.
    """
    num_loss_tokens, num_tokens = _count(engine, micro_batches)
    engine.set_training(True)
    try:
        loss, metrics = engine.forward_backward(
            micro_batches,
            loss_fn,
            engine.gradient_divisor / num_loss_tokens,
            temperature,
            lambda is_last: host.gradient_sync(engine, is_last),
        )
    except BaseException:
        engine.zero_grad()
        raise
    step = host.optimizer_step(engine)
    if step.applied:
        engine.note_weights_changed()
    names = sorted(metrics)
    means = _sum_over_ranks(engine.data_parallel, torch.stack([loss, *(metrics[name] for name in names)])).div(
        num_loss_tokens
    )
    mean_loss, *mean_metrics = means.tolist()
    return StepReport(
        loss=mean_loss,
        metrics=dict(zip(names, mean_metrics, strict=True)),
        num_loss_tokens=num_loss_tokens,
        num_tokens=num_tokens,
        num_micro_batches=len(micro_batches),
        optimizer=step,
    )


def _count(engine: Engine, micro_batches: Sequence[PackedBatch]) -> tuple[int, int]:
    """Count loss tokens and tokens over all ranks, and check that the ranks agree on the number of micro-batches.

    Ranks with different numbers of forwards would wait for each other for ever: a sum of squares tells in the same
    all-reduce whether all are equal (n * sum of squares = square of the sum holds only then).
    """
    own = len(micro_batches)
    local = [
        sum(batch.loss_positions.numel() for batch in micro_batches),
        sum(batch.num_tokens for batch in micro_batches),
        own,
        own * own,
    ]
    counts = torch.tensor(local, dtype=torch.int64, device=engine.device.torch_device)
    num_loss_tokens, num_tokens, total, squares = _sum_over_ranks(engine.data_parallel, counts).tolist()
    size, rank = engine.data_parallel.size, engine.data_parallel.rank
    if size * squares != total * total or own == 0:
        raise BatchError(
            f"rank {rank} brings {own} micro-batches, all {size} ranks together {total}; every rank must bring the "
            "same number, at least one (plan_micro_batches makes such a division)"
        )
    if num_loss_tokens == 0:
        raise BatchError(
            "no token of the global batch is in the loss (loss_mask is False everywhere); nothing to learn"
        )
    return num_loss_tokens, num_tokens


def _sum_over_ranks(data_parallel: DataParallel, values: torch.Tensor) -> torch.Tensor:
    """All-reduce in place, where there is more than one rank."""
    if data_parallel.size > 1:
        dist.all_reduce(values, group=data_parallel.group)
    return values
