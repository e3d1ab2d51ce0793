"""The optimizer step: clipping, schedule, and what a gradient that is not finite leaves untouched."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from plugins.verl_fsdp.tests.driving import Driver, take
from plugins.verl_fsdp.tests.reference import load_reference, make_sequences, sequence_log_probs, weighted_loss
from verl_engine.contract.errors import BatchError, TrainingDivergedError
from verl_engine.testing.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-2,
    "warmup_steps": 2,
    "total_steps": 5,
    "lr_schedule": "linear",
    "weight_decay": 0.1,
    "max_grad_norm": 0.05,
}


def reference_weights(folder: Path, num_steps: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train the plain model with torch's own AdamW and clipping; return weights and norms."""
    model = load_reference(folder)
    decayed = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    spared = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.95)
    )
    norms = []
    for step, factor in zip(range(num_steps), [0.5, 1.0, 1.0, 2 / 3], strict=False):
        sequences = make_sequences(8, seed=step)
        num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
        for sequence in sequences:
            mask = torch.from_numpy(sequence.loss_mask)
            weight = torch.from_numpy(sequence.fields["weight"])
            (-(sequence_log_probs(model, sequence)[mask] * weight[mask]).sum() / num_tokens).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.named_parameters()}, norms


def train_on_rank(rank: int, folder: Path, num_steps: int) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train with the engine; return weights, norms and learning rates."""
    driver = Driver.create(folder, **SETTINGS)
    reports = []
    for step in range(num_steps):
        split = [list(range(rank, 8, 2))[:2], list(range(rank, 8, 2))[2:]]
        reports.append(driver.step(take(make_sequences(8, seed=step), split)).optimizer)
    return driver.weights(), [report.grad_norm for report in reports], [report.learning_rate for report in reports]


@pytest.mark.dist
def test_four_steps_equal_one_process(model_folder: Path) -> None:
    expected, expected_norms = reference_weights(model_folder, 4)
    for weights, norms, rates in run_ranks(train_on_rank, model_folder, 4):
        assert norms == pytest.approx(expected_norms, rel=1e-5)
        assert rates == pytest.approx([0.5e-2, 1e-2, 1e-2, 1e-2 * 2 / 3])
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=2e-5)


def poisoned_step(rank: int, folder: Path) -> dict[str, Any]:
    """Make one good step, one whose gradient is NaN on rank 1 only, and one good step."""
    driver = Driver.create(folder, **SETTINGS)
    batches = [take(make_sequences(8, seed=seed), [list(range(rank, 8, 2))]) for seed in range(3)]

    def poison(output: Any, batch: Any) -> Any:
        loss, metrics = weighted_loss(output, batch)
        return loss * (float("nan") if rank == 1 else 1.0), metrics

    driver.step(batches[0])
    before, state = driver.weights(), copy.deepcopy(_optimizer_state(driver))
    report = driver.step(batches[1], poison)
    same_weights = all(torch.equal(tensor, before[name]) for name, tensor in driver.weights().items())
    same_state = all(torch.equal(a, b) for a, b in zip(state, _optimizer_state(driver), strict=True))
    no_gradients = all(parameter.grad is None for parameter in driver.engine.parameters.values())
    after = driver.step(batches[2])
    return {
        "applied": report.optimizer.applied,
        "same": (same_weights, same_state, no_gradients),
        "next_rate": after.optimizer.learning_rate,
        "weights": driver.weights(),
    }


def _optimizer_state(driver: Driver) -> list[torch.Tensor]:
    states = driver.engine.optimizer.state.values()
    return [torch.as_tensor(getattr(value, "_local_tensor", value)) for state in states for value in state.values()]


def without_poison(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    """Make only the two good steps."""
    driver = Driver.create(folder, **SETTINGS)
    for seed in (0, 2):
        driver.step(take(make_sequences(8, seed=seed), [list(range(rank, 8, 2))]))
    return driver.weights()


@pytest.mark.dist
def test_a_gradient_not_finite_on_one_rank_is_skipped_by_all(model_folder: Path) -> None:
    results = run_ranks(poisoned_step, model_folder)
    expected = run_ranks(without_poison, model_folder)[0]
    for result in results:
        assert result["applied"] is False
        assert result["same"] == (True, True, True)
        assert result["next_rate"] == 1e-2  # the second of two warm-up steps: the skipped one did not count
        assert all(torch.equal(tensor, expected[name]) for name, tensor in result["weights"].items())


def diverge(rank: int, folder: Path) -> str:
    """Train on NaN until the worker gives up."""
    from verl_engine.engine.worker import EngineWorker
    from verl_fsdp.config import Fsdp2Config

    config = Fsdp2Config(learning_rate=1e-3, device="cpu", max_skipped_steps=3)
    worker = EngineWorker(config, folder, rank, 1)
    worker.create()
    sequences = make_sequences(2)
    for sequence in sequences:
        sequence.fields["weight"][:] = float("nan")
    for _ in range(2):
        assert not worker.train_batch([sequences], weighted_loss).optimizer.applied
    with pytest.raises(TrainingDivergedError) as caught:
        worker.train_batch([sequences], weighted_loss)
    return str(caught.value)


@pytest.mark.dist
def test_a_run_of_skipped_steps_stops_the_job(model_folder: Path) -> None:
    (message,) = run_ranks(diverge, model_folder, world_size=1)
    assert "3 optimizer steps in a row (engine.max_skipped_steps)" in message


def uneven(rank: int, folder: Path) -> str:
    """Bring one micro-batch on rank 0 and two on rank 1."""
    driver = Driver.create(folder)
    with pytest.raises(BatchError) as caught:
        driver.step([make_sequences(1)] * (rank + 1))
    return str(caught.value)


@pytest.mark.dist
def test_uneven_numbers_of_micro_batches_are_refused_on_all_ranks(model_folder: Path) -> None:
    messages = run_ranks(uneven, model_folder)
    assert "rank 0 brings 1 micro-batches, all 2 ranks together 3" in messages[0]
    assert "rank 1 brings 2 micro-batches" in messages[1]


def nothing_to_learn(rank: int, folder: Path) -> str:
    """Bring a batch without a token in the loss."""
    driver = Driver.create(folder)
    with pytest.raises(BatchError) as caught:
        driver.step([[]])
    return f"{rank}: {caught.value}"


@pytest.mark.dist
def test_a_batch_without_loss_tokens_is_refused(model_folder: Path) -> None:
    (message,) = run_ranks(nothing_to_learn, model_folder, world_size=1)
    assert "no token of the global batch is in the loss" in message
