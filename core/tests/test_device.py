"""Choosing the accelerator."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from verl_engine.contract.errors import ConfigError
from verl_engine.engine import device as device_module
from verl_engine.engine.device import Device

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Pretend to have accelerators: fill in ``torch.<kind>`` by kind; records the calls."""
    modules: dict[str, Any] = {}
    monkeypatch.setattr(device_module, "_module", lambda kind: modules[kind])
    monkeypatch.setattr(device_module, "_is_available", lambda kind: kind in modules)
    return modules


def fake_module(calls: list[tuple[str, int]], count: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        device_count=lambda: count,
        set_device=lambda index: calls.append(("set", index)),
        synchronize=lambda index: calls.append(("synchronize", index)),
    )


def test_the_cpu() -> None:
    device = Device.resolve("cpu", index=3)
    assert device == Device("cpu", 0)
    assert device.torch_device == torch.device("cpu")
    assert device.collectives == "gloo"
    device.activate()
    device.synchronize()


def test_auto_takes_an_accelerator_where_there_is_one(accelerators: dict[str, Any]) -> None:
    assert Device.resolve("auto") == Device("cpu")
    accelerators["cuda"] = fake_module([])
    assert Device.resolve("auto", 1) == Device("cuda", 1)
    accelerators["npu"] = fake_module([])
    assert Device.resolve("auto", 1) == Device("npu", 1)


@pytest.mark.parametrize(("kind", "collectives"), [("cuda", "nccl"), ("npu", "hccl")])
def test_an_accelerator(kind: str, collectives: str, accelerators: dict[str, Any]) -> None:
    calls: list[tuple[str, int]] = []
    accelerators[kind] = fake_module(calls)
    device = Device.resolve(kind, index=6)
    assert device == Device(kind, 2), "wraps around the four that are visible"
    assert device.collectives == collectives
    device.activate()
    device.synchronize()
    assert calls == [("set", 2), ("synchronize", 2)]


def test_memory_is_a_share_of_the_machines_on_the_cpu_and_the_whole_of_an_accelerator(
    accelerators: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(device_module, "_CGROUP_LIMIT", limit)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert Device("cpu").memory_bytes() == machine
    assert Device("cpu").memory_bytes(local_ranks=4) == machine // 4
    limit.write_text("max\n", encoding="ascii")
    assert Device("cpu").memory_bytes() == machine
    limit.write_text("1048576\n", encoding="ascii")
    assert Device("cpu").memory_bytes(local_ranks=2) == 524288, "a container has less than its machine"
    accelerators["npu"] = SimpleNamespace(mem_get_info=lambda index: (index, 64 << 30))
    assert Device("npu", 3).memory_bytes(local_ranks=8) == 64 << 30


def test_what_is_not_there_is_refused(accelerators: dict[str, Any]) -> None:
    assert accelerators == {}
    with pytest.raises(ConfigError, match="device='cuda' is not available on this machine; use auto or cpu"):
        Device.resolve("cuda")
    with pytest.raises(ConfigError, match="device='tpu' is not known; use auto, cpu, cuda, npu"):
        Device.resolve("tpu")


def test_without_torch_npu_there_is_no_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="device='npu' is not available"):
        Device.resolve("npu")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_real_gpu() -> None:
    device = Device.resolve("cuda", torch.cuda.device_count())
    device.activate()
    assert torch.ones(1, device=device.torch_device).device.index == 0
    device.synchronize()
