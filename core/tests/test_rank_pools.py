"""Ranks that many tests share: found again, replaced where they must be, and as new for each call."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl_engine.testing.rank_pool import RankError
from verl_engine.testing.rank_pools import RankPools

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.dist


@pytest.fixture
def pools() -> Iterator[RankPools]:
    pools = RankPools()
    yield pools
    pools.close()


def own_process(_rank: int) -> int:
    return os.getpid()


def fail(_rank: int) -> None:
    raise ValueError("on purpose")


def end_group(_rank: int) -> None:
    dist.destroy_process_group()


def set_mark() -> None:
    os.environ["A_TEST_PREPARED"] = "yes"


def marks(_rank: int) -> tuple[str | None, str | None]:
    return os.environ.get("A_TEST_PREPARED"), os.environ.get("A_TEST_ASKED")


def test_the_same_ranks_are_found_again(pools: RankPools) -> None:
    assert pools.get(1) is pools.get(1)
    assert pools.run(own_process, world_size=1) == pools.run(own_process, world_size=1)


def test_other_ranks_are_others(pools: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, prepared, asked = (
        pools.get(1),
        pools.get(1, prepare=set_mark),
        pools.get(1, prepare=set_mark, environment={"A_TEST_ASKED": "too"}),
    )
    found = [pool.run(marks) for pool in (plain, prepared, asked)]
    assert found == [[(None, None)], [("yes", None)], [("yes", "too")]]
    monkeypatch.setattr(sys, "path", [*sys.path, "/nowhere"])
    assert pools.get(1) is not plain


def test_after_a_failure_there_are_new_ones(pools: RankPools) -> None:
    first = pools.get(1)
    with pytest.raises(RankError, match="on purpose"):
        first.run(fail)
    second = pools.get(1)
    assert second is not first
    assert second.run(own_process)


def test_ranks_without_their_group_are_replaced(pools: RankPools) -> None:
    first = pools.get(2)
    first.run(end_group)
    assert first.is_worn
    assert pools.get(2) is not first
    assert first.is_closed


def make_groups(_rank: int) -> None:
    for _ in range(3):
        dist.new_group()


def num_groups(_rank: int) -> int:
    return len(dist.distributed_c10d._world.pg_map)


def test_groups_of_a_call_end_with_it_and_the_ranks_stay(pools: RankPools) -> None:
    ranks = pools.get(2)
    ranks.run(make_groups)
    assert pools.get(2) is ranks
    assert ranks.run(num_groups) == [1, 1]


def test_those_used_longest_ago_end_first(pools: RankPools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_engine.testing.rank_pools._MOST_RANKS", 2)
    first, second = pools.get(1), pools.get(1, prepare=set_mark)
    assert pools.get(1) is first
    third = pools.get(1, environment={"A_TEST_ASKED": "too"})
    assert [pool.is_closed for pool in (first, second, third)] == [False, True, False]


def test_fresh_ranks_are_new_each_time() -> None:
    pools = RankPools(is_fresh=True)
    first = pools.get(1)
    second = pools.get(1)
    pools.close()
    assert first is not second
    assert first.is_closed


def state(_rank: int) -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "path": list(sys.path),
        "filters": list(warnings.filters),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
        "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),  # noqa: NPY002
    }


def change(_rank: int) -> None:
    os.environ["A_TEST_LEFT"] = "behind"
    del os.environ["WORLD_SIZE"]
    os.chdir("/")
    sys.path.append("/nowhere")
    warnings.simplefilter("error")
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)


def test_what_a_call_changes_is_as_before_for_the_next(pools: RankPools) -> None:
    ranks = pools.get(1)
    before = ranks.run(state)
    ranks.run(change)
    assert ranks.run(state) == before


def test_the_plugin_costs_no_torch() -> None:
    code = "import sys, verl_engine.testing.pytest_plugin as plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
