"""One process group for all workers of a process: taken where it fits, refused where not, ended by the last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from verl_engine.contract.errors import ConfigError
from verl_engine.engine.device import Device
from verl_engine.engine.process_group import join_process_group, leave_process_group

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


def join(folder: Path, rank: int = 0, world_size: int = 1, device: Device = CPU) -> None:
    join_process_group(device, f"file://{folder}/store", rank, world_size, 60.0)


def test_the_group_ends_with_the_last_of_those_that_use_it(tmp_path: Path) -> None:
    join(tmp_path)
    join(tmp_path)
    leave_process_group()
    assert dist.is_initialized()
    join(tmp_path)
    leave_process_group()
    leave_process_group()
    assert not dist.is_initialized()
    join(tmp_path / "..")
    leave_process_group()
    assert not dist.is_initialized()


def test_a_group_of_somebody_else_is_used_and_stays(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    join(tmp_path)
    leave_process_group()
    assert dist.is_initialized()


def test_a_group_that_somebody_else_made_in_place_of_ours_is_not_ended(tmp_path: Path) -> None:
    join(tmp_path)
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/second", rank=0, world_size=1)
    leave_process_group()
    assert dist.is_initialized()


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
    join(tmp_path)
    with pytest.raises(ConfigError, match=rf"in a process group already, as rank 0 of 1 over gloo; .* needs {needs}"):
        join(tmp_path, rank, world_size, device)
    leave_process_group()
    assert not dist.is_initialized()
