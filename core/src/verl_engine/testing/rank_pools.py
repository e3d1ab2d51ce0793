"""Worlds of ranks that many tests share: each is started when it is first asked for, and stays."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from verl_engine.testing.rank_pool import RankPool
from verl_engine.testing.rank_state import end_groups

Result = TypeVar("Result")

_MOST_RANKS: Final = 16
"""Processes that stay at once; those used longest ago end first."""


class OnRanks(Protocol):
    """Has the signature of `run_ranks`; the ranks stay for the next call."""

    def __call__(  # noqa: D102 - the class says it
        self, function: Callable[..., Result], *args: object, world_size: int = 2, timeout_s: float = 120.0
    ) -> list[Result]: ...


class RankPools:
    """Pools of ranks, found by what they are.

    A pool is replaced when a failure closed it, or when a call left in its ranks what cannot be put back.
    """

    def __init__(self, *, is_fresh: bool = False) -> None:
        """Start nothing yet; `is_fresh` is slow, and shows what tests owe to each other."""
        self._is_fresh = is_fresh
        self._pools: dict[object, RankPool] = {}

    def get(
        self,
        world_size: int = 2,
        *,
        prepare: Callable[[], None] | None = None,
        must_precede: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        tidy: Callable[[], None] | None = end_groups,
        device: str = "cpu",
    ) -> RankPool:
        """Return ranks that are as asked for; arguments as those of `RankPool`."""
        settings = (world_size, prepare, tuple(must_precede), tuple(sorted((environment or {}).items())), tidy, device)
        key = (*settings, tuple(sys.path))  # ranks import from where this process does
        pool = self._pools.pop(key, None)
        if pool is not None and (self._is_fresh or pool.is_worn):
            pool.close()
        if pool is None or pool.is_closed:
            pool = RankPool(
                world_size,
                prepare=prepare,
                must_precede=must_precede,
                environment=environment,
                tidy=tidy,
                device=device,
            )
        self._pools[key] = pool
        self._close_oldest()
        return pool

    def run(
        self, function: Callable[..., Result], *args: object, world_size: int = 2, timeout_s: float = 120.0
    ) -> list[Result]:
        """Call ``function(rank, *args)`` on ranks that stay: what `run_ranks` does with new ones."""
        return self.get(world_size).run(function, *args, timeout_s=timeout_s)

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def _close_oldest(self) -> None:
        num_ranks = sum(pool.world_size for pool in self._pools.values())
        for key, pool in list(self._pools.items())[:-1]:
            if num_ranks <= _MOST_RANKS:
                return
            num_ranks -= pool.world_size
            pool.close()
            del self._pools[key]
