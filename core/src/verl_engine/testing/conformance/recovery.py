"""After an exception in the middle of an accumulation, the next gradient is right."""

from functools import partial
from typing import Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.base import TokenOutput
from verl_engine.testing.conformance.bench import Bench
from verl_engine.testing.conformance.check import Check, all_ranks, refusal
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss

TOLERANCE: Final = 1e-6
NUM_MICRO_BATCHES: Final = 3


class LossFailedError(RuntimeError):
    """Stands for whatever a user's loss may raise."""


class _FailingLoss:
    def __init__(self, fail_at: int) -> None:
        self._left = fail_at

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self._left == 0:
            raise LossFailedError
        self._left -= 1
        return weighted_loss(output, batch)


def first_micro_batch(bench: Bench) -> None:
    """An exception in the first micro-batch leaves nothing behind."""
    _fail_at(bench, 0)


def middle_micro_batch(bench: Bench) -> None:
    """An exception after a micro-batch whose gradient is unreduced leaves nothing behind."""
    _fail_at(bench, 1)


def last_micro_batch(bench: Bench) -> None:
    """An exception in the last micro-batch leaves nothing behind."""
    _fail_at(bench, NUM_MICRO_BATCHES - 1)


def backward(bench: Bench) -> None:
    """An exception in the middle of a backward leaves nothing behind."""
    # Every rank has sequences of the same lengths, so that all fail at the same place and none waits for the others.
    probe = bench.probe()
    sequences = [sequence for sequence in make_sequences(6) for _ in range(probe.driver.data_parallel_size)]
    micro_batches = probe.driver.micro_batches(sequences, NUM_MICRO_BATCHES)
    expected = probe.gradient(micro_batches)
    counter = _FailingBackward(fail_at=None)
    with counter.watching():
        probe.gradient(micro_batches)
    assert counter.count, "autograd saved nothing for the backward"
    for fraction in (0.25, 0.5, 0.9):
        with _FailingBackward(fail_at=int(counter.count * fraction)).watching():
            failure = refusal(BackwardFailedError, lambda: probe.driver.step(micro_batches))
        bench.require(failure is not None, "an exception in the backward did not come out of the step")
        found = probe.gradient(micro_batches)
        bench.require_gradient(found, expected, "after an exception in a backward, the next gradient", TOLERANCE)


class BackwardFailedError(RuntimeError):
    """Stands for whatever may go wrong in a backward, such as too little memory."""


class _FailingBackward:
    """Raises at one of the tensors that autograd saved in the forward, when the backward asks for it."""

    def __init__(self, fail_at: int | None) -> None:
        self.count = 0
        self._fail_at = fail_at

    def watching(self) -> saved_tensors_hooks:
        """Return a context to make a step in."""
        return saved_tensors_hooks(lambda tensor: tensor, self._unpack)

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.count == self._fail_at:
            raise BackwardFailedError
        self.count += 1
        return tensor


def _fail_at(bench: Bench, fail_at: int) -> None:
    sequences = make_sequences(12)
    probe = bench.probe()
    # After each failure another number of micro-batches: what was left switched off shows in a single one.
    for num_micro_batches in (1, NUM_MICRO_BATCHES):
        expected = probe.gradient_of(sequences, num_micro_batches)
        micro_batches = probe.driver.micro_batches(make_sequences(12, seed=1), NUM_MICRO_BATCHES)
        failure = refusal(LossFailedError, partial(probe.driver.step, micro_batches, _FailingLoss(fail_at)))
        bench.require(failure is not None, "an exception of the loss function did not come out of the step")
        bench.require_gradient(
            probe.gradient_of(sequences, num_micro_batches),
            expected,
            f"after an exception in micro-batch {fail_at} of {NUM_MICRO_BATCHES}, the next gradient, over "
            f"{num_micro_batches} micro-batches,",
            TOLERANCE,
        )


CHECKS = (
    Check("recovery/first_micro_batch", (all_ranks(first_micro_batch),)),
    Check("recovery/middle_micro_batch", (all_ranks(middle_micro_batch),)),
    Check("recovery/last_micro_batch", (all_ranks(last_micro_batch),)),
    Check("recovery/backward", (all_ranks(backward),)),
)
