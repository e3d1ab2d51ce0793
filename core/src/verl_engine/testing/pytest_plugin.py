"""For pytest, by ``-p verl_engine.testing.pytest_plugin``: ranks that all tests of a session share. No torch."""

from collections.abc import Iterator

import pytest

from verl_engine.testing.rank_pools import OnRanks, RankPools


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that makes every test start its own ranks."""
    parser.addoption(
        "--fresh-ranks", action="store_true", help="start new ranks for each test instead of sharing those that stay"
    )


@pytest.fixture(scope="session")
def rank_pools(pytestconfig: pytest.Config) -> Iterator[RankPools]:
    """Give the pools of ranks of this session."""
    pools = RankPools(is_fresh=pytestconfig.getoption("--fresh-ranks"))
    yield pools
    pools.close()


@pytest.fixture
def on_ranks(rank_pools: RankPools) -> OnRanks:
    """Give a function that does what `run_ranks` does, on ranks that stay."""
    return rank_pools.run
