"""Environment variables that change how training runs, with a hint where a value is unusual."""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple


class Situation(NamedTuple):
    """What hints depend on, besides the value."""

    environment: Mapping[str, str]
    cores: int
    num_ranks: int
    """That are to run on this machine."""
    installed: frozenset[str]
    """Normalised names of distributions."""


class Variable(NamedTuple):
    """One environment variable."""

    name: str
    value: str | None
    hint: str | None
    """What is unusual about the value, and what to do; None where nothing is."""


ALWAYS_SHOWN: Final = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "HF_HUB_OFFLINE",
)  # fmt: skip
"""Also where they are not set."""
SHOWN_PREFIXES: Final = ("ASCEND_", "GLOO_", "HCCL_", "NCCL_", "PYTORCH_", "RAY_", "VERL_ENGINE_")
"""Of variables that are shown where they are set."""
SECRET_WORDS: Final = ("TOKEN", "PASSWORD", "SECRET", "KEY")


def read_environment(situation: Situation) -> list[Variable]:
    """Return the variables that matter: first those that always do, then by name."""
    environment = situation.environment
    others = sorted(name for name in environment if name.startswith(SHOWN_PREFIXES) and name not in ALWAYS_SHOWN)
    return [Variable(name, _shown(name, environment), _hint(name, situation)) for name in (*ALWAYS_SHOWN, *others)]


def _shown(name: str, environment: Mapping[str, str]) -> str | None:
    value = environment.get(name)
    return "(set, not shown)" if value and any(word in name for word in SECRET_WORDS) else value


def _hint(name: str, situation: Situation) -> str | None:
    value = situation.environment.get(name)
    special = _HINTS.get(name)
    if special is not None:
        return special(value, situation)
    if value is None:
        return None
    if name in {"HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_BUFFSIZE"} and not value.isdecimal():
        return "must be a whole number"
    if name.startswith("ASCEND_") and name.endswith(("_PATH", "_HOME")):
        return _missing_folder(value)
    return _missing_interface(value) if name.endswith("_SOCKET_IFNAME") else None


def _omp_num_threads(value: str | None, situation: Situation) -> str | None:
    if value is None:
        threads = situation.cores
        if threads * situation.num_ranks <= situation.cores:
            return None
        return f"not set: each of {situation.num_ranks} ranks starts {threads} threads; export OMP_NUM_THREADS=1"
    if not value.isdecimal() or int(value) == 0:
        return "must be a whole number above 0"
    if int(value) * situation.num_ranks <= situation.cores:
        return None
    fitting = max(1, situation.cores // situation.num_ranks)
    fix = f"export OMP_NUM_THREADS={fitting}" if int(value) > fitting else f"use at most {situation.cores} ranks here"
    return (
        f"{value} threads x {situation.num_ranks} ranks are more than the {situation.cores} cores here; ranks that "
        f"share cores slow each other down badly; {fix}"
    )


def _omp_wait_policy(value: str | None, _: Situation) -> str | None:
    if value is not None and value.upper() == "ACTIVE":
        return "waiting threads take cores from other ranks; export OMP_WAIT_POLICY=PASSIVE"
    return None


def _autoload(value: str | None, situation: Situation) -> str | None:
    if value == "0" and "torch-npu" in situation.installed:
        return "torch_npu is not imported with torch; engines here import it themselves, other programs may not"
    return None


def _visible_devices(value: str | None, _: Situation) -> str | None:
    if value is None:
        return None
    if not value.strip() or value.strip() == "-1":
        return "hides every device; unset it to see them"
    places = [place.strip() for place in value.split(",")]
    return "names a device twice" if len(set(places)) < len(places) else None


def _ascend_home(value: str | None, situation: Situation) -> str | None:
    if value is None:
        is_needed = "torch-npu" in situation.installed
        return "not set, but torch_npu is installed; source CANN's set_env.sh first" if is_needed else None
    return _missing_folder(value)


def _ray_address(value: str | None, _: Situation) -> str | None:
    return f"jobs join the Ray cluster at {value}, and start none of their own" if value else None


def _missing_folder(value: str) -> str | None:
    missing = [folder for folder in value.split(os.pathsep) if folder and not Path(folder).exists()]
    return f"{missing[0]} does not exist; source CANN's set_env.sh again" if missing else None


def _missing_interface(value: str) -> str | None:
    """Check the names of network interfaces; nccl and hccl also take =exact and ^excluded ones."""
    here = [name for _, name in socket.if_nameindex()]
    wanted = [name.lstrip("=") for name in value.split(",") if name and not name.startswith("^")]
    missing = [name for name in wanted if not any(interface.startswith(name) for interface in here)]
    return f"no network interface is called {missing[0]}; there are {', '.join(here)}" if missing else None


_HINTS: Final[Mapping[str, Callable[[str | None, Situation], str | None]]] = {
    "ASCEND_HOME_PATH": _ascend_home,
    "ASCEND_RT_VISIBLE_DEVICES": _visible_devices,
    "CUDA_VISIBLE_DEVICES": _visible_devices,
    "OMP_NUM_THREADS": _omp_num_threads,
    "OMP_WAIT_POLICY": _omp_wait_policy,
    "RAY_ADDRESS": _ray_address,
    "TORCH_DEVICE_BACKEND_AUTOLOAD": _autoload,
}
