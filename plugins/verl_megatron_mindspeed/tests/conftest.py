"""Shared by the tests of this plugin. Pytest's own process never imports Megatron: it is not prepared for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from plugins.verl_megatron_mindspeed.tests.prepared_ranks import new_ranks
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Qwen3."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="session")
def pools() -> Iterator[list[RankPool]]:
    """The processes that stay, in a list of one: their start takes as long as many tests."""
    pools = [new_ranks()]
    yield pools
    pools[0].close()


@pytest.fixture
def ranks(pools: list[RankPool]) -> RankPool:
    """Two processes that are prepared for Megatron on the CPU; after a failure others."""
    if pools[0].is_closed:
        pools[0] = new_ranks()
    return pools[0]
