"""One optimizer step over a global batch: the gradient is that of the sum of losses over one number, however split."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

import torch
import torch.distributed as dist

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.choices import require_choice
from verl_engine.contract.errors import BatchError, ConfigError, EngineError, UnsupportedError
from verl_engine.contract.optimizer_step import OptimizerStep
from verl_engine.engine.base import Engine, LossFn
from verl_engine.engine.micro_batch_pass import MicroBatchPass
from verl_engine.engine.routed_experts import FIELD
from verl_engine.host.backend_host import BackendHost

_Counted = Literal["tokens", "sequences"]
Normalizer = _Counted | float
"""What the sums of a global batch are divided by: its loss tokens, its sequences with loss tokens, or a constant."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a training step did; equal on every data-parallel rank."""

    loss: float
    """The global batch's sum over the normaliser: by default the mean over its loss tokens."""
    metrics: dict[str, float]
    """The loss function's metrics, each reduced as it says; plain ones as the loss is. `EngineWorker` adds those of
    observers, which are of its own rank."""
    num_loss_tokens: int
    num_tokens: int
    """All tokens that went through the model, on all ranks."""
    num_micro_batches: int
    """On each rank."""
    optimizer: OptimizerStep


def train_step(
    host: BackendHost,
    engine: Engine,
    micro_batches: Sequence[PackedBatch],
    loss_fn: LossFn,
    temperature: float = 1.0,
    *,
    normalizer: Normalizer = "tokens",
    learning_rate: float | None = None,
) -> StepReport:
    """Compute the gradient of a global batch and step the optimizer.

    Args:
        host: of the backend that made the engine.
        engine: in train mode when it returns.
        micro_batches: this rank's; every rank brings the same number, at least one.
        loss_fn: see `LossFn`; the same on every rank.
        temperature: divides the logits before the softmax; sequences with a field ``temperature`` have their own.
        normalizer: what the global batch's sums are divided by; the same on every rank.
        learning_rate: of this step, used as it is; by default the schedule's.
    Raises:
        ConfigError: the learning rate is no number of 0 or more, or the normaliser none above 0.
        BatchError: the ranks bring different numbers of micro-batches, no token is in the loss, or other ranks refuse
            theirs.
        EngineError: `require_usable` refuses this rank's.
        Exception: whatever the model or the loss raises; the gradient is forgotten first, so the next step is right.
    Collectives: the backend's, and over the data-parallel group an all-reduce of counts and one or two of results.
    """
    if learning_rate is not None and not 0 <= learning_rate < math.inf:
        raise ConfigError(f"learning_rate={learning_rate} of a step must be a number of 0 or more")
    given: object = normalizer  # whatever its annotation says
    if not isinstance(given, Real) or not 0 < float(given) < math.inf:
        require_choice("normalizer", given, _Counted, or_else=", or a number above 0")
    num_loss_tokens, num_tokens, denominator = _count(host, engine, micro_batches, normalizer)
    engine.set_training(True)
    run = MicroBatchPass(
        micro_batches,
        loss_fn,
        lambda is_last: host.gradient_sync(engine, is_last),
        loss_scale=engine.gradient_divisor / denominator,
        temperature=temperature,
    )
    try:
        engine.forward_backward(run)
    except BaseException:
        engine.zero_grad()
        raise
    step = host.optimizer_step(engine, learning_rate)
    if step.applied:
        engine.note_weights_changed()
    loss, metrics = run.totals.reduced(engine.data_parallel, denominator)
    return StepReport(
        loss=loss,
        metrics=metrics,
        num_loss_tokens=num_loss_tokens,
        num_tokens=num_tokens,
        num_micro_batches=len(micro_batches),
        optimizer=step,
    )


def require_usable(host: BackendHost, engine: Engine, micro_batches: Sequence[PackedBatch]) -> None:
    """Refuse own positions, experts, and ids of which log-probs are wanted, where the engine would not use them.

    Raises:
        BatchError: an id is beyond the vocabulary.
        UnsupportedError: the backend declares the gap, or the config does not ask for it.
    """
    highest = max((batch.highest_id for batch in micro_batches), default=0)
    if engine.vocab_size is not None and highest >= engine.vocab_size:
        raise BatchError(
            f"token id {highest} is beyond the model's vocabulary of {engine.vocab_size}: the sequences were made with "
            "another model's tokenizer, or with tokens that this model does not have"
        )
    if any(batch.has_own_positions for batch in micro_batches):
        host.require("own_positions")
    if any(batch.top_k or "top_k_ids" in batch.fields for batch in micro_batches):
        host.require("top_k_log_probs")
    if not engine.config.router_replay and any(FIELD in batch.fields for batch in micro_batches):
        host.require("router_replay")
        raise UnsupportedError(
            f"the sequences bring {FIELD}, which engine.router_replay=false would leave unused; set it to true, or "
            "leave the field out"
        )


def _count(
    host: BackendHost, engine: Engine, micro_batches: Sequence[PackedBatch], normalizer: Normalizer
) -> tuple[int, int, float]:
    """Return loss tokens, tokens and normaliser over all ranks, of which none may refuse, and all bring equally many.

    Else they would wait for each other forever; n * sum of squares = square of the sum holds only where all are equal.
    """
    refusal = None
    try:
        require_usable(host, engine, micro_batches)
    except EngineError as error:
        refusal = error
    own = len(micro_batches)
    by_sequences = normalizer == "sequences"
    local = [
        sum(batch.loss_positions.numel() for batch in micro_batches),
        sum(batch.num_tokens for batch in micro_batches),
        sum(batch.num_loss_sequences for batch in micro_batches) if by_sequences else 0,
        own,
        own * own,
        refusal is not None,
    ]
    counts = torch.tensor(local, dtype=torch.int64, device=engine.device.torch_device)
    size, rank = engine.data_parallel.size, engine.data_parallel.rank
    if size > 1:
        dist.all_reduce(counts, group=engine.data_parallel.group)
    num_loss_tokens, num_tokens, num_sequences, total, squares, num_refusals = counts.tolist()
    if num_refusals:
        raise refusal or BatchError(f"{num_refusals} of {size} ranks refuse their micro-batches; their errors say why")
    if size * squares != total * total or own == 0:
        raise BatchError(
            f"rank {rank} brings {own} micro-batches, all {size} ranks together {total}; every rank must bring the "
            "same number, at least one (plan_micro_batches makes such a division)"
        )
    if num_loss_tokens == 0:
        raise BatchError("no token of the global batch is in the loss (loss_mask is False everywhere)")
    counted = num_sequences if by_sequences else num_loss_tokens
    return num_loss_tokens, num_tokens, counted if isinstance(normalizer, str) else normalizer
