"""A Ray cluster of this job alone: on this machine, on its loopback interface, behind a token of its own."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import ray
from ray._private import ray_constants, services

from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping

    from verl_async.config import RayConfig

LOOPBACK: Final = "127.0.0.1"
_NEEDED: Final = ("gcs_server", "raylet")
"""The processes without which Ray does not go on."""


class LocalCluster:
    """Starts Ray here and knows its processes."""

    def __init__(self, config: RayConfig, num_actors: int, quiet: Mapping[str, Any]) -> None:
        """Start it; the token must be in the environment.

        Raises:
            ConfigError: Ray would let in whoever asks.
        """
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        with ExitStack() as stack:
            # Ray has no setting for loopback on Linux: it replaces 127.0.0.1 by the address of a network card, and
            # each server then listens on all of them. Its constant for laptops with other systems leaves it alone.
            stack.enter_context(patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False))
            stack.enter_context(patch.object(services, "ConsolePopen", self._process_class()))
            self.context = ray.init(
                # Without it, Ray would take a cluster that it finds in RAY_ADDRESS, or one that runs on this machine.
                address="local",
                _node_ip_address=LOOPBACK,
                num_cpus=max(num_actors, os.cpu_count() or 1),
                object_store_memory=config.object_store_bytes,
                include_dashboard=False,
                **quiet,
            )
        if os.environ.get("RAY_AUTH_MODE") != "token":
            raise ConfigError(f"Ray {ray.__version__} started without authentication; install ray>=2.60")

    def dead_process(self) -> str | None:
        """Name one of Ray's processes that ended, though the job needs it."""
        for name, process in self._processes.items():
            if _has_ended(process):
                return f"{name} (process {process.pid})"
        return None

    def _process_class(self) -> type[subprocess.Popen[bytes]]:
        """Return what Ray starts its processes with: each in a group of its own.

        What ends the job's group (a lost terminal, `timeout`, a batch system) leaves Ray alive to save the model.
        """
        processes, ray_class = self._processes, services.ConsolePopen

        class OwnGroup(ray_class):  # type: ignore[misc, valid-type] # Ray has no types
            def __init__(self, command: list[str], **options: Any) -> None:
                super().__init__(command, **options, process_group=0)
                if (name := Path(command[0]).name) in _NEEDED:
                    processes[name] = self

        return OwnGroup


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Look without reaping: as long as the process id is taken, Ray's workers take their raylet for alive, and live on.

    So the model can still be saved.
    """
    if process.returncode is not None or not hasattr(os, "waitid"):  # macOS has none before Python 3.13
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@contextmanager
def token_in(file: Path) -> Iterator[None]:
    """Have all processes of a cluster started inside know each other by the token in a file; it goes on leaving."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    before = {name: os.environ.pop(name, None) for name in names}
    try:
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(_token())
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)  # that there is no mode has Ray choose `token`
        yield
    finally:
        file.unlink(missing_ok=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@cache
def _token() -> str:
    """One for all clusters of this process: Ray reads it once."""
    return secrets.token_hex(32)
