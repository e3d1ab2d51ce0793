"""The accelerator of this process: the one place that knows CPU, CUDA and Ascend NPU apart."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch

from verl_engine.contract.errors import ConfigError

_COLLECTIVES: Final = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True)
class Device:
    """One device of one kind, such as ``cuda:3``; the CPU has index 0."""

    kind: str
    index: int = 0

    @classmethod
    def resolve(cls, kind: str, index: int = 0) -> Self:
        """Choose the device of a rank.

        Args:
            kind: ``cpu``, ``cuda``, ``npu``, or ``auto`` for an accelerator where there is one, else the CPU.
            index: which of them; wraps around the number visible to this process, and is 0 for the CPU.
        Raises:
            ConfigError: no such device is available here.
        """
        if kind == "auto":
            kind = next((name for name in ("npu", "cuda") if _is_available(name)), "cpu")
        if kind == "cpu":
            return cls("cpu")
        if kind not in _COLLECTIVES:
            raise ConfigError(f"device={kind!r} is not known; use auto, {', '.join(_COLLECTIVES)}")
        if not _is_available(kind):
            raise ConfigError(f"device={kind!r} is not available on this machine; use auto or cpu")
        return cls(kind, index % _module(kind).device_count())

    @property
    def torch_device(self) -> torch.device:
        """What tensors are created on."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.index)

    @property
    def collectives(self) -> str:
        """Name of the torch.distributed backend: gloo, nccl or hccl."""
        return _COLLECTIVES[self.kind]

    def activate(self) -> None:
        """Make it the process's current device."""
        if self.kind != "cpu":
            _module(self.kind).set_device(self.index)

    def synchronize(self) -> None:
        """Wait until all queued work is done."""
        if self.kind != "cpu":
            _module(self.kind).synchronize(self.index)

    def memory_bytes(self, local_ranks: int = 1) -> int:
        """Return the device's whole memory, in use or not; on the CPU this rank's share of the machine's.

        Args:
            local_ranks: ranks on this machine, which share the CPU's memory. An accelerator is a rank's own.
        """
        if self.kind != "cpu":
            _, total = _module(self.kind).mem_get_info(self.index)
            return int(total)
        return _machine_memory_bytes() // local_ranks


def _module(kind: str) -> Any:
    return torch.get_device_module(kind)


def _machine_memory_bytes() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = _CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:  # no container, or an old kernel
        return machine
    return min(machine, int(limit)) if limit.isdigit() else machine  # "max" where there is no limit


def _is_available(kind: str) -> bool:
    if kind == "npu":
        # torch.npu exists only after torch_npu was imported, and torch_npu only where it is installed.
        if importlib.util.find_spec("torch_npu") is None:
            return False
        importlib.import_module("torch_npu")
    return bool(_module(kind).is_available())
