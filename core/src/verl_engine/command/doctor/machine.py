"""Python, the machine, and what torch finds on it. Torch is imported in its own process: it may be slow, or crash."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from verl_engine.command.doctor.findings import Finding
from verl_engine.host.distributions import Distribution
from verl_engine.host.install_hints import pip_install

PACKAGES: Final = (
    "verl-engine-core", "torch", "torch-npu", "transformers", "numpy", "ray", "torchvision", "torchaudio", "triton",
    "megatron-core", "mindspeed", "vllm",
)  # fmt: skip
"""Whose versions are shown, where they are installed."""
LEAST_SHARED_MEMORY: Final = 1 << 30
_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - what is measured
_PROBE: Final = """
import importlib.util, json
import torch
found = {}
for kind in ("cuda", "npu"):
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            continue
        import torch_npu
    module = torch.get_device_module(kind)
    if module.is_available():
        found[kind] = [module.get_device_name(index) for index in range(module.device_count())]
print(json.dumps(found))
"""


def describe_machine() -> dict[str, Any]:
    """Return Python, platform, cores and the size of shared memory."""
    total, free = _shared_memory()
    # Fewer than the machine has under taskset or in a container.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cores": cores,
        "shared_memory_bytes": total,
        "shared_memory_free_bytes": free,
    }


def package_versions(installed: Mapping[str, Distribution]) -> dict[str, str]:
    """Return the versions of the installed ones of `PACKAGES`."""
    return {name: installed[name].version for name in PACKAGES if name in installed}


def find_devices(installed: Mapping[str, Distribution], timeout_s: float) -> tuple[dict[str, list[str]], str]:
    """Ask torch, in a process of its own, for names of devices by kind, the CPU among them; and say what went wrong."""
    devices = {"cpu": [platform.processor() or platform.machine()]}
    if "torch" not in installed:
        return devices, "torch is not installed"
    try:
        done = subprocess.run(  # noqa: S603 - our own code
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return devices, f"torch was not imported after {timeout_s:g} s"
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return devices, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return {**devices, **json.loads(lines[-1])}, ""


def machine_findings(machine: Mapping[str, Any], torch_error: str) -> list[Finding]:
    """Say what is wrong with torch, and whether shared memory is small."""
    findings = []
    if torch_error:
        fix = pip_install("torch") if "not installed" in torch_error else None
        findings.append(Finding("error", "torch", torch_error, fix))
    free = machine["shared_memory_free_bytes"]
    if free is not None and free < LEAST_SHARED_MEMORY:
        findings.append(
            Finding(
                "warning",
                str(_SHARED_MEMORY),
                f"{free / 2**20:.0f} MiB are free; weights on their way to rollout workers and Ray's object store lie "
                "there, and take more. In Docker, start the container with --shm-size=16g",
            )
        )
    return findings


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        status = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return None, None
    return status.f_frsize * status.f_blocks, status.f_frsize * status.f_bavail
