"""One process group for all workers of a process: taken where it fits, refused where not, ended by the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from verl_engine.contract.errors import ConfigError
from verl_engine.engine.device import Device
from verl_engine.engine.process_group import SharedGroup, is_alive

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.fault(18)
CPU = Device("cpu")


@pytest.fixture(autouse=True)
def no_group_before_and_after() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def join(folder: Path, rank: int = 0, world_size: int = 1, device: Device = CPU) -> SharedGroup:
    return SharedGroup.join(device, f"file://{folder}/store", rank, world_size, 60.0)[0]


def start(folder: Path) -> None:
    """Start a group, as a trainer does that workers are a part of."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/others", rank=0, world_size=1)


def test_the_group_ends_with_the_last_of_those_that_use_it(tmp_path: Path) -> None:
    first, second = join(tmp_path), join(tmp_path)
    first.leave()
    assert dist.is_initialized()
    third = join(tmp_path)
    second.leave()
    third.leave()
    assert not dist.is_initialized()
    join(tmp_path / "..").leave()
    assert not dist.is_initialized()


def test_the_first_of_those_that_use_it_is_told_so(tmp_path: Path) -> None:
    start(tmp_path)
    assert [SharedGroup.join(CPU, None, 0, 1, 60.0)[1] for _ in range(2)] == [True, False]


def test_a_group_of_somebody_else_is_used_and_stays(tmp_path: Path) -> None:
    start(tmp_path)
    join(tmp_path).leave()
    assert dist.is_initialized()


def test_of_a_group_of_somebody_else_only_what_engines_made_is_ended(tmp_path: Path) -> None:
    start(tmp_path)
    theirs = dist.new_group([0])
    first, second = join(tmp_path), join(tmp_path)
    with first.owning():
        made = dist.new_group([0])
    later = dist.new_group([0])
    first.leave()
    assert is_alive(made), "the second may use it"
    second.leave()
    assert [is_alive(group) for group in (made, theirs, later)] == [False, True, True]


def test_a_group_that_somebody_else_made_in_place_of_ours_is_not_ended(tmp_path: Path) -> None:
    ours = join(tmp_path)
    dist.destroy_process_group()
    start(tmp_path)
    later = join(tmp_path)
    with later.owning():
        made = dist.new_group([0])
    ours.leave()
    assert is_alive(made)
    later.leave()
    assert dist.is_initialized()


def test_without_a_group_one_must_say_how_to_join(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"in no process group, .* give prepare an init_method"):
        SharedGroup.join(CPU, None, 0, 1, 60.0)
    join(tmp_path).leave()


@pytest.mark.parametrize(
    ("rank", "world_size", "device", "needs"),
    [
        (0, 2, CPU, "rank 0 of 2 over gloo"),
        (1, 2, CPU, "rank 1 of 2 over gloo"),
        (0, 1, Device("cuda"), "rank 0 of 1 over nccl"),
    ],
)
def test_a_group_that_does_not_fit_is_refused_with_both(
    tmp_path: Path, rank: int, world_size: int, device: Device, needs: str
) -> None:
    ours = join(tmp_path)
    with pytest.raises(ConfigError, match=rf"in a process group already, as rank 0 of 1 over gloo; .* needs {needs}"):
        join(tmp_path, rank, world_size, device)
    ours.leave()
    assert not dist.is_initialized()
