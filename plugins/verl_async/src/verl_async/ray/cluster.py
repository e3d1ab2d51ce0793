"""The Ray cluster of a job: one of its own, or one that runs already."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from verl_async.config import RayConfig


@dataclass(frozen=True, slots=True)
class ActorNeeds:
    """What one kind of actor needs."""

    field: str
    """Config field that says how many; for messages."""
    count: int
    device: str
    """``auto``, ``cpu``, ``cuda`` or ``npu``."""
    num_threads: int


_RESOURCES = {"cuda": "GPU", "npu": "NPU"}


@contextmanager
def ray_cluster(config: RayConfig, num_actors: int) -> Iterator[None]:
    """Connect to the cluster, or start one on this machine; on leaving, all that was started is ended.

    Args:
        config: the ``ray`` section.
        num_actors: how many the job starts: a cluster of its own has a CPU slot for each, whatever the machine has.
    Raises:
        ConfigError: the address does not answer.
    """
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if config.address is None:
            ray.init(
                num_cpus=max(num_actors, os.cpu_count() or 1),
                object_store_memory=config.object_store_bytes,
                include_dashboard=False,
                **quiet,
            )
        else:
            ray.init(address=config.address, **quiet)
    except (ConnectionError, ValueError, OSError) as error:
        what = "a new cluster could not be started" if config.address is None else "the cluster does not answer"
        raise ConfigError(f"ray.address={config.address}: {what} ({error})") from error
    try:
        yield
    finally:
        ray.shutdown()


def actor_options(needs: list[ActorNeeds]) -> list[dict[str, Any]]:
    """Choose the resources of each kind of actor.

    Raises:
        ConfigError: the cluster does not have them: Ray would wait for ever.
    """
    available = ray.cluster_resources()
    options = []
    for need in needs:
        resource = _accelerator(need, available)
        options.append(
            {
                "num_cpus": 1,
                "num_gpus": 1 if resource == "GPU" else 0,
                "resources": {"NPU": 1} if resource == "NPU" else {},
                # Threads that spin on a core another rank works on slow both tenfold.
                "runtime_env": {
                    "env_vars": {"OMP_NUM_THREADS": str(need.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
                },
            }
        )
        for name in ("CPU", resource):
            if name is not None:
                available[name] = available.get(name, 0) - need.count
                if available[name] < 0:
                    raise ConfigError(
                        f"{need.field}={need.count} actors need as many {name}s, and the Ray cluster is {-available[name]:g} "
                        f"short; lower it, add nodes, or set the device to cpu"
                    )
    return options


def _accelerator(need: ActorNeeds, available: dict[str, float]) -> str | None:
    """Return Ray's name of the accelerator an actor takes, or None for the CPU."""
    if need.device == "auto":
        return next((name for name in ("NPU", "GPU") if available.get(name, 0) >= 1), None)
    return _RESOURCES.get(need.device)
