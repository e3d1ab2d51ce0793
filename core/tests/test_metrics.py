"""Metrics are reduced over micro-batches and ranks as each says."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from verl_engine.contract.errors import BatchError
from verl_engine.engine.metrics import Metric, Totals
from verl_engine.engine.process_group import DataParallel

if TYPE_CHECKING:
    from verl_engine.testing.rank_pools import OnRanks

ALONE = DataParallel(0, 1, None)


def number(value: float) -> torch.Tensor:
    return torch.tensor(value)


def metrics(value: float) -> dict[str, torch.Tensor | Metric]:
    """One of each kind."""
    return {
        "plain": number(value),
        "sum": Metric(number(value)),
        "mean": Metric(number(value), "mean", number(2.0)),
        "average": Metric(number(value), "mean"),
        "max": Metric(number(value), "max"),
        "min": Metric(number(value), "min"),
    }


def test_each_kind_worked_by_hand() -> None:
    totals = Totals(torch.device("cpu"))
    totals.add(number(1.0), metrics(3.0), has_loss_tokens=True)
    totals.add(number(2.0), metrics(-1.0), has_loss_tokens=True)
    loss, found = totals.reduced(ALONE, 4.0)
    assert loss == 0.75
    assert found == {"plain": 0.5, "sum": 0.5, "mean": 0.5, "average": 1.0, "max": 3.0, "min": -1.0}
    assert list(found) == sorted(found)


def test_an_unknown_reduction_is_refused() -> None:
    wrong: Any = "avg"
    with pytest.raises(BatchError, match=r"^a metric's reduction='avg' must be one of sum, mean, max, min$"):
        Metric(number(1.0), wrong)


def test_a_micro_batch_without_loss_tokens_counts_in_sums_only() -> None:
    totals = Totals(torch.device("cpu"))
    totals.add(number(0.0), metrics(math.nan) | {"plain": number(0.0), "sum": number(0.0)}, has_loss_tokens=False)
    assert math.isnan(totals.reduced(ALONE, 1.0)[1]["mean"])
    totals.add(number(2.0), metrics(5.0), has_loss_tokens=True)
    assert totals.reduced(ALONE, 1.0)[1] == {"plain": 5, "sum": 5, "mean": 2.5, "average": 5, "max": 5, "min": 5}


def test_what_one_rank_has_another_can_take() -> None:
    first, second = Totals(torch.device("cpu")), Totals(torch.device("cpu"))
    first.add(number(1.0), metrics(3.0), has_loss_tokens=True)
    second.take(first.keys, first.vector(first.keys))
    assert second.reduced(ALONE, 2.0) == first.reduced(ALONE, 2.0)


def test_totals_have_no_gradient() -> None:
    totals = Totals(torch.device("cpu"))
    value = number(1.0).requires_grad_()
    totals.add(value * 2, {"max": Metric(value, "max"), "sum": value}, has_loss_tokens=True)
    assert not totals.vector(totals.keys).requires_grad


def reduce_on_rank(rank: int) -> tuple[float, dict[str, float]]:
    totals = Totals(torch.device("cpu"))
    totals.add(number(float(rank)), metrics(2.0 * rank - 1), has_loss_tokens=True)
    return totals.reduced(DataParallel(rank, dist.get_world_size(), dist.group.WORLD), 2.0)


@pytest.mark.dist
def test_ranks_agree(on_ranks: OnRanks) -> None:
    expected = {"average": 0.0, "max": 1.0, "mean": 0.0, "min": -1.0, "plain": 0.0, "sum": 0.0}
    assert on_ranks(reduce_on_rank) == [(0.5, expected)] * 2
