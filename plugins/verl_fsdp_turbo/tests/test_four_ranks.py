"""Layouts that take four ranks: copies of shards, split sequences with data parallelism, copied and sharded experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from plugins.verl_fsdp_turbo.tests.on_ranks import build, tidy
from plugins.verl_fsdp_turbo.tests.test_experts import EXPERTS, prepare_newer, write_experts
from plugins.verl_fsdp_turbo.tests.test_ulysses import BY_ENGINE
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import furthest, make_sequences

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

NUM_RANKS: Final = 4
OPTIMIZER: Final[dict[str, Any]] = {"learning_rate": 1e-2, "eps": 1e-3, "max_grad_norm": 0.05}


@pytest.fixture
def four(rank_pools: RankPools, library_folder: Path, only_fake: None) -> RankPool:
    assert library_folder.is_dir()
    assert only_fake is None
    return rank_pools.get(NUM_RANKS, prepare=prepare_newer, tidy=tidy)


def as_fsdp2(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[float, float, float, int]:
    """Return norms of a step by both, how far weights are off after it, and the data-parallel size."""
    plain = Driver({"backend": "fsdp2", "device": "cpu"} | OPTIMIZER, folder, rank, NUM_RANKS)
    turbo = build(rank, folder, NUM_RANKS, **OPTIMIZER, **settings)
    expected, found = (driver.train(make_sequences(8)).optimizer.grad_norm for driver in (plain, turbo))
    return found, expected, furthest(turbo.weights(), plain.weights())[1], turbo.data_parallel_size


EXPERT_LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "two copies of each rank's experts": {},
    "experts sharded over two ranks": {"expert_fully_shard_parallel_size": 2},
    "beside copies of shards": {"fully_shard_parallel_size": 2},
}


@pytest.mark.dist
@pytest.mark.nightly
@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_divided_experts_train_as_whole_ones_in_every_layout(tmp_path: Path, four: RankPool, layout: str) -> None:
    folder = write_experts(tmp_path / "moe", 4)
    for norm, expected, furthest_off, _ in four.run(as_fsdp2, folder, EXPERTS | EXPERT_LAYOUTS[layout]):
        assert norm == pytest.approx(expected, rel=1e-4)
        assert furthest_off < 1e-5


@pytest.mark.dist
def test_two_shares_of_split_sequences_over_copies_of_shards_train_as_one_world(
    model_folder: Path, four: RankPool
) -> None:
    settings = BY_ENGINE | {"fully_shard_parallel_size": 2}
    for norm, expected, furthest_off, data_parallel_size in four.run(as_fsdp2, model_folder, settings):
        assert data_parallel_size == 2
        assert norm == pytest.approx(expected, rel=1e-4)
        assert furthest_off < 1e-5
