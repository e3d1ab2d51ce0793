"""Whatever else an engine does, ranks that split sequences do the same as ranks that split nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist

from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import LossFn, TokenOutput
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

LEARNING_RATE: Final = 10.0


def entropy_loss(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The kit's loss with a bonus for entropy."""
    loss, metrics = weighted_loss(output, batch)
    return loss - 0.3 * output.entropy.sum(), {**metrics, "entropy": output.entropy.detach().sum()}


def value_loss(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The square of each value's distance to its token's weight."""
    weight = batch.fields["weight"] if batch.fields else torch.zeros(batch.num_tokens)
    loss = (output.values - weight)[batch.loss_mask].square().sum()
    return loss, {"value": output.values.detach().sum()}


CASES: Final[dict[str, tuple[dict[str, Any], LossFn]]] = {
    "entropy": ({"entropy": "gradient"}, entropy_loss),
    "value head": ({"head": "value"}, value_loss),
    "lora": ({"lora": {"rank": 4}}, weighted_loss),
    "lora on queries only": ({"lora": {"rank": 4, "target_modules": ["q_proj"]}}, weighted_loss),
    "offloaded": ({"cpu_offload": True}, weighted_loss),
    "kept unsharded": ({"keep_unsharded": True}, weighted_loss),
    "fsdp": ({"backend": "fsdp"}, weighted_loss),
    "fsdp lora": ({"backend": "fsdp", "lora": {"rank": 4}}, weighted_loss),
}


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    return rank_pools.get(2)


def train(
    rank: int, folder: Path, settings: dict[str, Any], loss_fn: LossFn
) -> tuple[list[tuple[float, ...]], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Make two clipped steps by SGD; return their metrics, what they changed, and the log-probs or values after."""
    section: dict[str, Any] = {
        "backend": "fsdp2", "device": "cpu", "learning_rate": LEARNING_RATE, "max_grad_norm": 0.01,
        "optimizer": "torch.optim.SGD", **settings,
    }  # fmt: skip
    driver = Driver(section, folder, rank, dist.get_world_size())
    before = driver.weights()
    reports = [
        driver.step(driver.micro_batches(make_sequences(9, seed)), loss_fn, temperature=0.7) for seed in range(2)
    ]
    metrics = [(report.loss, report.optimizer.grad_norm, *report.metrics.values()) for report in reports]
    changes = {name: weight - before[name] for name, weight in driver.weights().items()}
    return metrics, changes, driver.infer(make_sequences(6, seed=9))


@pytest.mark.dist
@pytest.mark.parametrize(("settings", "loss_fn"), CASES.values(), ids=CASES)
def test_two_ranks_that_split_sequences_learn_the_same(
    two_ranks: RankPool, model_folder: Path, settings: dict[str, Any], loss_fn: LossFn
) -> None:
    metrics, changes, inferred = two_ranks.run(train, model_folder, settings, loss_fn)[0]
    assert sum(float(change.square().sum()) for change in changes.values()) > 0
    split = {"sequence_parallel_size": 2, **settings}
    for found_metrics, found_changes, found_inferred in two_ranks.run(train, model_folder, split, loss_fn):
        for found, expected in zip(found_metrics, metrics, strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)
        largest = max(float(change.abs().max()) for change in changes.values())
        for name, change in found_changes.items():
            torch.testing.assert_close(change, changes[name], rtol=0, atol=2e-5 * largest)
        for one, other in zip(found_inferred, inferred, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
