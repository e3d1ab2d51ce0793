"""Shared by the tests of this plugin. Pytest's own process never imports Megatron: it is not prepared for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from plugins.verl_megatron_mindspeed.tests.prepared_ranks import prepared
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture
def ranks(rank_pools: RankPools) -> RankPool:
    """Two processes that are prepared for Megatron on the CPU, and stay for other tests."""
    return prepared(rank_pools, 2)
