"""Run a function on several gloo ranks of this machine, and report the failure that came first."""

from collections.abc import Callable
from typing import TypeVar

from verl_engine.testing.rank_pool import RankError, RankPool

__all__ = ["RankError", "run_ranks"]

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result], *args: object, world_size: int = 2, timeout_s: float = 120.0
) -> list[Result]:
    """Call ``function(rank, *args)`` in fresh processes of one gloo process group; see `RankPool.run`.

    `timeout_s` is for all of it; then the ranks are killed and the silent ones named.
    """
    pool = RankPool(world_size)
    try:
        return pool.run(function, *args, timeout_s=timeout_s)
    finally:
        pool.close()
