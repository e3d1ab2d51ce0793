"""How far rollouts may run ahead."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_async.config import AsyncTrainingConfig
from verl_async.orchestrator.staleness import StalenessBudget, prompts_between_syncs


def config(threshold: float, sync_step: int, require_batches: int) -> AsyncTrainingConfig:
    return AsyncTrainingConfig(
        staleness_threshold=threshold, trigger_parameter_sync_step=sync_step, require_batches=require_batches
    )


def take(budget: StalenessBudget, at_most: int | None = None) -> list[int]:
    """Acquire where that does not wait."""
    return list(asyncio.run(asyncio.wait_for(budget.acquire(at_most), 1.0)))


def test_limit_worked_by_hand() -> None:
    assert prompts_between_syncs(config(0.0, 1, 1), 32) == 32
    assert prompts_between_syncs(config(1.0, 1, 2), 32) == 128
    assert prompts_between_syncs(config(0.5, 4, 1), 3) == 18
    assert prompts_between_syncs(config(0.5, 1, 1), 3) == 4  # 4.5, rounded down


def test_decimal_thresholds_are_taken_as_written() -> None:
    assert prompts_between_syncs(config(0.1, 1, 1), 10) == 11  # 1.1 * 10 is 11.000000000000002 in binary
    assert prompts_between_syncs(config(0.7, 1, 1), 10) == 17
    assert prompts_between_syncs(config(0.15, 4, 1), 5) == 23  # 22.999999999999996


def test_nothing_is_granted_before_the_first_sync() -> None:
    budget = StalenessBudget(limit=4, total=8)
    assert budget.available == 0
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(budget.acquire(2), 0.01))
    budget.synced()
    assert budget.available == 4


def test_an_example_by_hand() -> None:
    budget = StalenessBudget(limit=6, total=10)
    budget.synced()
    assert take(budget, 4) == [0, 1, 2, 3]
    assert take(budget, 4) == [4, 5]
    budget.trained(4)
    assert budget.available == 0  # training alone does not make room: the samples under way are of the old weights
    budget.synced()  # two are left over, so four more
    assert take(budget, 9) == [6, 7, 8, 9]
    assert budget.exhausted
    assert take(budget, 9) == []
    assert budget.num_started == 10


def test_by_default_all_that_a_sync_granted_is_taken() -> None:
    budget = StalenessBudget(limit=7, total=10)
    budget.synced()
    assert take(budget) == list(range(7))
    budget.trained(7)
    budget.synced()
    assert take(budget) == [7, 8, 9]


def test_all_waiting_workers_are_woken_by_a_sync_and_by_the_end() -> None:
    async def main() -> list[range]:
        budget = StalenessBudget(limit=2, total=2)
        waiting = [asyncio.ensure_future(budget.acquire(1)) for _ in range(4)]
        await asyncio.sleep(0.01)
        budget.synced()
        return await asyncio.wait_for(asyncio.gather(*waiting), 1.0)

    assert sorted(map(list, asyncio.run(main()))) == [[], [], [0], [1]]


@settings(deadline=None)
@given(
    threshold=st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.5]),
    sync_step=st.integers(1, 4),
    require_batches=st.integers(1, 3),
    size=st.integers(1, 5),
    num_steps=st.integers(1, 9),
    wishes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
)
def test_never_more_than_the_limit_ahead_and_never_too_few(
    threshold: float,
    sync_step: int,
    require_batches: int,
    size: int,
    num_steps: int,
    wishes: list[int],
) -> None:
    """Plays rollouts that take as they may, then a step; needs every step's prompts to have been granted by then."""
    limit = prompts_between_syncs(config(threshold, sync_step, require_batches), size)
    per_step = require_batches * size
    budget = StalenessBudget(limit, per_step * num_steps)
    budget.synced()
    trained_at_sync, seen = 0, 0
    for step in range(1, num_steps + 1):
        index = 0
        while budget.available:
            at_most = wishes[index % len(wishes)]
            numbers = take(budget, at_most)
            assert numbers == list(range(seen, seen + len(numbers)))
            assert 1 <= len(numbers) <= at_most
            seen += len(numbers)
            index += 1
        assert seen <= min(trained_at_sync + limit, per_step * num_steps)
        assert seen >= per_step * step, "training would wait for ever"
        budget.trained(per_step)
        if step % sync_step == 0 or step == num_steps:
            budget.synced()
            trained_at_sync = per_step * step
    assert budget.exhausted
