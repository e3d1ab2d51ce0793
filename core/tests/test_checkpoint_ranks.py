"""Two ranks with the same plain model: they agree, or all of them say who is wrong or stuck."""

from __future__ import annotations

import errno
import os
import signal
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from core.tests.test_checkpoint_contents import draw
from core.tests.test_module_engine import PlainEngine, make, set_gradients, weights
from verl_engine.contract.errors import StuckError, WeightsError
from verl_engine.engine.checkpoints.folders import make_partial
from verl_engine.engine.checkpoints.manifest import CheckpointManifest
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.checkpoints.writer import CheckpointWriter
from verl_engine.testing.rank_pool import RankError, RankPool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_engine.testing.rank_pools import RankPools

pytestmark = pytest.mark.dist

WRITE_DATA = "verl_engine.engine.checkpoints.writer.FileSystemWriter.write_data"


@pytest.fixture
def two(rank_pools: RankPools) -> RankPool:
    return rank_pools.get(2)


def stepped(value: float = 1.0) -> PlainEngine:
    engine = make()
    set_gradients(engine, value)
    engine.optimizer_step()
    return engine


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except WeightsError as error:
        return str(error)
    return "nothing"


def save_each_random(rank: int, root: Path) -> tuple[float, float, float]:
    torch.manual_seed(rank)
    store = CheckpointStore(root)
    draw()
    store.save(stepped(), 1, {"epoch": 2})
    after = draw()
    store.close()
    return after


def load_and_draw(_: int, root: Path) -> tuple[object, tuple[float, float, float]]:
    store = CheckpointStore(root)
    info = store.load(engine := make())
    drawn = draw()
    assert all(torch.equal(tensor, weights(stepped())[name]) for name, tensor in weights(engine).items())
    store.close()
    return (info.step, info.user_state, info.world_size, info.rng), drawn


def test_each_rank_goes_on_with_its_own_random_numbers(two: RankPool, tmp_path: Path) -> None:
    expected = two.run(save_each_random, tmp_path)
    assert expected[0] != expected[1]
    for (info, drawn), after in zip(two.run(load_and_draw, tmp_path), expected, strict=True):
        assert info == (1, {"epoch": 2}, 2, "restored")
        assert drawn == after


def test_on_another_number_of_ranks_each_is_seeded_anew(two: RankPool, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(stepped(), 1, {"epoch": 2}, wait=True)
    first, again = two.run(load_and_draw, tmp_path), two.run(load_and_draw, tmp_path)
    assert [info for info, _ in first] == [(1, {"epoch": 2}, 1, "seeded anew")] * 2
    assert first == again
    assert first[0][1] != first[1][1]


def fail_on_one(rank: int, root: Path) -> tuple[str, list[int]]:
    store = CheckpointStore(root)
    store.save(stepped(), 1, wait=True)
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch(WRITE_DATA, side_effect=full) if rank == 1 else nullcontext():
        store.save(stepped(2.0), 2)
        message = raised(store.wait)
    store.save(stepped(3.0), 3, wait=True)
    steps = store.steps()
    store.close()
    return message, steps


def test_a_rank_that_cannot_write_is_named_on_every_rank(two: RankPool, tmp_path: Path) -> None:
    for message, steps in two.run(fail_on_one, tmp_path):
        assert "rank 1: OSError: [Errno 28] No space left on device" in message
        assert steps == [1, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]


def use_after_close(_: int, root: Path) -> str:
    store = CheckpointStore(root)
    store.close()
    return raised(lambda: store.save(stepped(), 1))


def test_a_closed_store_is_refused_where_ranks_would_write_each_for_itself(two: RankPool, tmp_path: Path) -> None:
    for message in two.run(use_after_close, tmp_path):
        assert "this store of checkpoints is closed" in message
    assert list(tmp_path.iterdir()) == []


def open_slowly(rank: int, root: Path) -> bool:
    """Say whether rank 1 had its connections when the store was made."""
    connected = root / "rank-1-is-connected"

    def new_group(**settings: Any) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.distributed_c10d.new_group(**settings)
        if rank == 1:
            time.sleep(0.3)
            connected.touch()
        return group

    with mock.patch("torch.distributed.new_group", new_group):
        store = CheckpointStore(root)
    is_connected = connected.exists()
    store.close()
    return is_connected


def test_no_rank_can_close_a_store_while_another_one_still_connects(two: RankPool, tmp_path: Path) -> None:
    assert two.run(open_slowly, tmp_path) == [True, True]


def write_elsewhere(rank: int, root: Path) -> str:
    store = CheckpointStore(root)
    elsewhere = root / f"disk-of-rank-{rank}"
    with mock.patch("verl_engine.engine.checkpoints.store.CheckpointWriter") as writer:
        writer.side_effect = lambda folder, *others: CheckpointWriter(folder if rank == 0 else elsewhere, *others)
        message = raised(lambda: store.save(stepped(), 1, wait=True))
    store.close()
    return message


def test_storage_that_the_ranks_do_not_share_is_told_at_the_first_save(two: RankPool, tmp_path: Path) -> None:
    for message in two.run(write_elsewhere, tmp_path):
        assert "__1_0.distcp is missing" in message
        assert "checkpoints must lie on storage that all ranks share" in message
    assert not (tmp_path / "step-00000001").exists()


def save_differently(rank: int, root: Path) -> str:
    store = CheckpointStore(root)
    message = raised(lambda: store.save(stepped(), 1, {"position": rank}))
    store.close()
    return message


def test_ranks_that_give_different_user_states_are_refused(two: RankPool, tmp_path: Path) -> None:
    for message in two.run(save_differently, tmp_path):
        assert 'rank 0 has step 1 and {"position": 0}, rank 1 has step 1 and {"position": 1}' in message
    assert not tmp_path.joinpath("step-00000001").exists()


def damage_for_one(rank: int, root: Path) -> tuple[str, bool]:
    store = CheckpointStore(root)
    store.save(stepped(), 1, wait=True)
    engine = make()
    broken = WeightsError("this rank sees an older storage")
    with mock.patch.object(CheckpointManifest, "read", side_effect=broken) if rank == 1 else nullcontext():
        message = raised(lambda: store.load(engine))
    is_untouched = all(torch.equal(tensor, weights(make())[name]) for name, tensor in weights(engine).items())
    store.close()
    return message, is_untouched


def test_where_one_rank_cannot_load_none_does(two: RankPool, tmp_path: Path) -> None:
    for message, is_untouched in two.run(damage_for_one, tmp_path):
        assert "rank 1: this rank sees an older storage" in message
        assert is_untouched


def come_late(rank: int, root: Path) -> str:
    store = CheckpointStore(root, timeout_s=0.5)
    if rank == 1:
        time.sleep(1.5)
        return ""
    with pytest.raises(StuckError) as caught:
        store.save(stepped(), 7)
    return str(caught.value)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, rank_pools: RankPools) -> None:
    pool = rank_pools.get(2)
    message = pool.run(come_late, tmp_path)[0]
    assert message == "the checkpoint of step 7: rank 1 did not come within 0.5 s (rank 0 waited)"


def die_while_writing(rank: int, root: Path) -> None:
    store = CheckpointStore(root, timeout_s=2.0)
    store.save(stepped(), 1, wait=True)
    with mock.patch(WRITE_DATA, side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL)) if rank else nullcontext():
        store.save(stepped(2.0), 2, wait=True)


def test_where_a_rank_is_killed_during_the_write_the_one_before_stays(tmp_path: Path) -> None:
    pool = RankPool(2)
    with pytest.raises(RankError, match="rank 1 of 2 failed first:\\nthe process died"):
        pool.run(die_while_writing, tmp_path)
    store = CheckpointStore(tmp_path)
    assert store.steps() == [1]
    assert store.load(make()).step == 1
    store.save(stepped(), 2, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def count_folders_made(_: int, root: Path) -> int:
    with mock.patch("verl_engine.engine.checkpoints.folders.make_partial", wraps=make_partial) as made:
        store = CheckpointStore(root)
        engine = stepped()
        assert engine.data_parallel.rank == 0  # on both ranks, as where they split one model
        store.save(engine, 1, wait=True)
        store.close()
    return made.call_count


def test_the_first_rank_of_the_world_alone_makes_folders(two: RankPool, tmp_path: Path) -> None:
    assert two.run(count_folders_made, tmp_path) == [1, 0]
