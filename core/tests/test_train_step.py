"""One optimizer step: counting, accumulation, and what happens when something fails."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from core.tests.fake_engine import FakeEngine, pack, toy_host
from verl_engine.batch.packed import PackedBatch
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError, ConfigError, UnsupportedError
from verl_engine.engine.train_step import StepReport, train_step

if TYPE_CHECKING:
    from verl_engine.engine.base import TokenOutput
    from verl_engine.testing.rank_pools import OnRanks


def summed_loss(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The negative log-likelihood, and the sum of the token ids as a metric."""
    ids = batch.input_ids[batch.loss_positions].float().sum()
    return -output.log_probs[batch.loss_positions].sum(), {"ids": ids, "half": ids / 2}


def gradient_of_next_step(engine: FakeEngine, *micro_batches: PackedBatch, temperature: float = 1.0) -> list[float]:
    """Take it from the change of the weights: the learning rate is 0.5."""
    before = engine.weights["logits"].detach().clone()
    train_step(toy_host(), engine, micro_batches, summed_loss, temperature)
    return [float(value) for value in (before - engine.weights["logits"].detach()) / 0.5]


def test_a_step_worked_by_hand() -> None:
    """Tokens 2, 3 and 3, 5 are in the loss: four, so each counts a quarter."""
    engine = FakeEngine({"logits": torch.arange(8.0).requires_grad_()})
    report = train_step(toy_host(), engine, [pack([1, 2, 3]), pack([1, 3, 5])], summed_loss)
    assert report.loss == pytest.approx(-(2 + 3 + 3 + 5) / 4)
    assert report.metrics == pytest.approx({"half": 13 / 8, "ids": 13 / 4})
    assert (report.num_loss_tokens, report.num_tokens, report.num_micro_batches) == (4, 6, 2)
    assert report.optimizer.grad_norm == pytest.approx((1 / 16 + 1 / 4 + 1 / 16) ** 0.5)
    expected = torch.arange(8.0) + 0.5 * torch.tensor([0, 0, 1, 2, 0, 1, 0, 0]) / 4
    assert engine.weights["logits"].tolist() == pytest.approx(expected.tolist())


def test_the_hooks_enclose_forward_and_backward_and_the_last_is_marked() -> None:
    engine = FakeEngine()
    train_step(toy_host(), engine, [pack([1, 2]), pack([1, 2, 3]), pack([4, 5])], summed_loss)
    assert engine.calls == [
        "training True",
        *("enter last=False", "forward 2", "leave"),
        *("enter last=False", "forward 3", "leave"),
        *("enter last=True", "forward 2", "leave"),
        "step",
    ]


def test_the_split_into_micro_batches_does_not_matter() -> None:
    rows = [[1, 2, 3, 4], [1, 5], [1, 2, 2], [6, 7]]
    whole = gradient_of_next_step(FakeEngine(), pack(*rows))
    assert whole == pytest.approx([0, 0, -3 / 7, -1 / 7, -1 / 7, -1 / 7, 0, -1 / 7])
    for split in ([[0], [1], [2], [3]], [[3, 1], [0, 2]], [[0, 1, 2], [3], []]):
        parts = [pack(*(rows[index] for index in part)) for part in split]
        assert gradient_of_next_step(FakeEngine(), *parts) == pytest.approx(whole)


def test_the_normaliser_is_one_number_for_the_global_batch() -> None:
    """Two of three sequences have loss tokens, four in all; by default each counts a quarter."""
    batches = [pack([1, 2, 3], [7]), pack([1, 3, 5])]
    losses = {}
    for normalizer in ("tokens", "sequences", 8.0):
        engine = FakeEngine()
        report = train_step(toy_host(), engine, batches, summed_loss, normalizer=normalizer)
        losses[normalizer] = float(engine.weights["logits"].detach()[2]) / 0.5
        assert report.metrics["half"] == pytest.approx(6.5 * losses[normalizer])
    assert losses == pytest.approx({"tokens": 1 / 4, "sequences": 1 / 2, 8.0: 1 / 8})
    wrong: Any
    for wrong in (0.0, float("inf"), float("nan"), -1.0, "token", "", None):
        with pytest.raises(ConfigError, match=rf"^normalizer={wrong!r} must be one of tokens, sequences, or a number"):
            train_step(toy_host(), FakeEngine(), batches, summed_loss, normalizer=wrong)


def test_a_learning_rate_that_is_none_is_refused() -> None:
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="of a step must be a number of 0 or more"):
            train_step(toy_host(), FakeEngine(), [pack([1, 2])], summed_loss, learning_rate=wrong)


def test_the_temperature_reaches_the_engine() -> None:
    assert gradient_of_next_step(FakeEngine(), pack([1, 2]), temperature=2.0)[2] == pytest.approx(-0.5)


def test_a_field_takes_the_place_of_the_temperature() -> None:
    sequence = Sequence(np.array([1, 2]), np.array([False, True]), {"temperature": np.array([1, 4], np.float32)})
    gradient = gradient_of_next_step(FakeEngine(), PackedBatch.from_sequences([sequence]), temperature=2.0)
    assert gradient[2] == pytest.approx(-0.25)


def test_own_positions_are_refused_where_the_backend_would_not_use_them() -> None:
    sequence = Sequence(np.array([1, 2]), np.array([False, True]), positions=np.array([3, 4]))
    with pytest.raises(UnsupportedError, match="cannot do 'own_positions'"):
        train_step(toy_host(), FakeEngine(), [PackedBatch.from_sequences([sequence])], summed_loss)


def test_an_averaging_backend_is_corrected() -> None:
    engine = FakeEngine()
    engine.gradient_divisor = 4
    assert gradient_of_next_step(engine, pack([1, 2]))[2] == pytest.approx(-4.0)  # its own reduction divides by four


def test_nothing_in_the_loss_is_refused_before_the_engine_runs() -> None:
    engine = FakeEngine()
    with pytest.raises(BatchError, match="no token of the global batch is in the loss"):
        train_step(toy_host(), engine, [pack([1])], summed_loss)
    with pytest.raises(BatchError, match="rank 0 brings 0 micro-batches"):
        train_step(toy_host(), engine, [], summed_loss)
    assert engine.calls == []


def test_a_failure_forgets_the_gradient_so_far() -> None:
    def fail_on_the_second(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if batch.num_tokens == 3:
            raise ZeroDivisionError
        return summed_loss(output, batch)

    engine = FakeEngine()
    with pytest.raises(ZeroDivisionError):
        train_step(toy_host(), engine, [pack([1, 2]), pack([1, 2, 3])], fail_on_the_second)
    assert engine.calls[-1] == "zero_grad"
    assert "step" not in engine.calls
    assert engine.weights["logits"].grad is None
    assert gradient_of_next_step(engine, pack([1, 5])) == [0, 0, 0, 0, 0, -1, 0, 0]


def step_on_rank(rank: int, rows: list[list[list[list[int]]]]) -> StepReport | str:
    """``rows[rank][micro_batch]``; a refusal comes back as its message."""
    engine = FakeEngine(rank=rank, size=dist.get_world_size())
    try:
        return train_step(toy_host(), engine, [pack(*part) for part in rows[rank]], summed_loss)
    except BatchError as error:
        return str(error)


@pytest.mark.dist
def test_tokens_are_counted_over_all_ranks(on_ranks: OnRanks) -> None:
    first, second = on_ranks(step_on_rank, [[[[1, 2, 3]]], [[[1, 4], [1, 5, 6]]]])
    assert isinstance(first, StepReport)
    assert isinstance(second, StepReport)
    for report in (first, second):
        assert (report.num_loss_tokens, report.num_tokens, report.num_micro_batches) == (5, 8, 1)
        assert report.metrics["ids"] == pytest.approx((2 + 3 + 4 + 5 + 6) / 5)
    assert first.optimizer.grad_norm == pytest.approx(2**0.5 / 5)  # this engine does not reduce


@pytest.mark.dist
def test_ranks_with_different_numbers_of_micro_batches_are_all_refused(on_ranks: OnRanks) -> None:
    first, second = on_ranks(step_on_rank, [[[[1, 2]], [[1, 2]]], [[[1, 2]]]])
    assert "rank 0 brings 2 micro-batches, all 2 ranks together 3; every rank must bring the same" in str(first)
    assert "rank 1 brings 1 micro-batches, all 2 ranks together 3" in str(second)
