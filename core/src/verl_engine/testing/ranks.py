"""Run a function on several gloo ranks of this machine, and report the failure that came first."""

from collections.abc import Callable
from typing import TypeVar

from verl_engine.testing.rank_pool import RankError, RankPool

__all__ = ["RankError", "run_ranks"]

Result = TypeVar("Result")


def run_ranks(
    function: Callable[..., Result], *args: object, world_size: int = 2, timeout_s: float = 120.0
) -> list[Result]:
    """Call ``function(rank, *args)`` in `world_size` fresh processes that share a gloo process group.

    Args:
        function: module-level and picklable, as its arguments and result must be.
        args: passed to every rank.
        world_size: number of processes, each with one CPU thread.
        timeout_s: for all of it; then the ranks are killed and the silent ones named.
    Returns:
        Each rank's result, in rank order.
    Raises:
        RankError: a rank raised, died or did not respond in time.
    """
    pool = RankPool(world_size)
    try:
        return pool.run(function, *args, timeout_s=timeout_s)
    finally:
        pool.close()
