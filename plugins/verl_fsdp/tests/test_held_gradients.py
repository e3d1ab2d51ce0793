"""The choice of when gradients are reduced, by what a rank must hold of them meanwhile."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from verl_engine.contract.validation import validate
from verl_fsdp.config import Fsdp2Config
from verl_fsdp.update.held_gradients import SyncChoice, choose_sync

if TYPE_CHECKING:
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

pytestmark = pytest.mark.dist


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    return rank_pools.get(2)


def choose(
    settings: dict[str, Any], memory: int, num_trained: int, must_reduce: str = ""
) -> tuple[SyncChoice, list[str]]:
    """Choose for two ranks that share a copy, and return what was logged."""
    config = validate(Fsdp2Config, {"backend": "fsdp2", "learning_rate": 1e-3, **settings}, at="engine")
    device: Any = SimpleNamespace(torch_device=torch.device("cpu"), memory_bytes=lambda _ranks: memory)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("verl_fsdp")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        return choose_sync(config, num_trained, -(-num_trained // 2), device, must_reduce=must_reduce), messages
    finally:
        log.removeHandler(handler)


def choose_on_rank(
    rank: int, settings: dict[str, Any], memory: list[int], num_trained: int, must_reduce: str = ""
) -> tuple[SyncChoice, list[str]]:
    return choose(settings, memory[rank], num_trained, must_reduce)


AUTO: Final = {"gradient_sync": "auto"}


def test_auto_takes_the_last_where_a_whole_gradient_fits_a_quarter_of_the_memory(two_ranks: RankPool) -> None:
    # A million parameters: 4 MB whole, 2 MB a shard.
    results = two_ranks.run(choose_on_rank, AUTO, [16_000_000, 16_000_000], 1_000_000)
    assert {choice.mode for choice, _ in results} == {"last_micro_batch"}
    choice, messages = results[0]
    assert (choice.held_bytes, choice.last_bytes, choice.every_bytes) == (4_000_000, 4_000_000, 2_000_000)
    (message,) = messages
    assert message == (
        "gradients are reduced at last_micro_batch (auto: a whole gradient fits a quarter of the memory, 4000000 "
        "bytes); each rank holds 4000000 bytes of gradients while it accumulates (last_micro_batch: 4000000, "
        "every_micro_batch: 2000000)"
    )
    assert results[1][1] == [], "the first rank speaks for all"


def test_a_deferred_gradient_that_does_not_fit_is_reduced_at_once(two_ranks: RankPool) -> None:
    ((choice, messages), _) = two_ranks.run(choose_on_rank, AUTO, [15_999_996, 16_000_000], 1_000_000)
    assert (choice.mode, choice.held_bytes) == ("every_micro_batch", 2_000_000)
    assert "does not fit a quarter of the memory, 3999999 bytes" in messages[0]


def test_ranks_with_unequal_memory_decide_alike(two_ranks: RankPool) -> None:
    for memory in ([1 << 40, 1000], [1000, 1 << 40]):
        results = two_ranks.run(choose_on_rank, AUTO, memory, 1_000_000)
        assert {choice.mode for choice, _ in results} == {"every_micro_batch"}


def test_a_budget_in_the_config_counts_instead_of_the_memory(two_ranks: RankPool) -> None:
    for budget, mode in ((4_000_000, "last_micro_batch"), (3_999_999, "every_micro_batch"), (0, "every_micro_batch")):
        settings = {**AUTO, "held_gradient_bytes": budget}
        ((choice, messages), _) = two_ranks.run(choose_on_rank, settings, [0, 0], 1_000_000)
        assert choice.mode == mode
        assert f"held_gradient_bytes={budget}" in messages[0]


def test_what_must_be_reduced_at_once_is(two_ranks: RankPool) -> None:
    ((choice, messages), _) = two_ranks.run(choose_on_rank, AUTO, [1 << 40] * 2, 10, "it cannot hold float32")
    assert choice.mode == "every_micro_batch"
    assert "auto: it cannot hold float32" in messages[0]


@pytest.mark.parametrize(("mode", "held"), [("last_micro_batch", 40), ("every_micro_batch", 20)])
def test_a_fixed_mode_says_what_it_holds_too(two_ranks: RankPool, mode: str, held: int) -> None:
    ((choice, messages), _) = two_ranks.run(choose_on_rank, {"gradient_sync": mode}, [0, 0], 10)
    assert (choice.mode, choice.held_bytes) == (mode, held)
    assert f"reduced at {mode} (as configured); each rank holds {held} bytes" in messages[0]
