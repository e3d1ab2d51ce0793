"""What each kind of actor asks of the cluster: a CPU, and an accelerator or a share of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_ACCELERATORS: Final = {"npu": "NPU", "cuda": "GPU"}
"""Ray's name of each kind of device."""
_RANK_SHARE: Final = 0.6
"""Of an accelerator that a trainer rank shares: more than half, for two ranks cannot be on one (NCCL refuses)."""


@dataclass(frozen=True, slots=True)
class ActorNeeds:
    """What one kind of actor needs."""

    field: str
    """Config field that says how many; for messages."""
    count: int
    device_field: str
    """Config field that says where they run; for messages."""
    device: str
    """``auto``, ``cpu``, ``cuda`` or ``npu``."""
    num_threads: int


@dataclass(frozen=True, slots=True)
class ActorResources:
    """What one actor of a kind is given."""

    accelerator: str | None
    """``GPU``, ``NPU``, or None for the CPU."""
    share: float
    """Of that accelerator; 1 is all of it."""
    num_threads: int

    def options(self) -> dict[str, Any]:
        """As Ray takes them."""
        return {
            "num_cpus": 1,
            "num_gpus": self.share if self.accelerator == "GPU" else 0,
            "resources": {"NPU": self.share} if self.accelerator == "NPU" else {},
            # Threads that spin on a core another rank works on slow both.
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(self.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}},
        }


def divide_resources(
    ranks: ActorNeeds, workers: ActorNeeds, cluster: Mapping[str, float]
) -> tuple[ActorResources, ActorResources]:
    """Divide the cluster's accelerators between trainer ranks and rollout workers.

    Each has one of its own where there are enough. Else every rank has one, and the rollout workers share those that
    are left; where none is left, they share those of the ranks.

    Args:
        ranks: of the trainer.
        workers: for rollouts; their number may be 0.
        cluster: Ray's names of the resources, with how many the cluster has.
    Returns:
        What one rank and one worker get. Where a worker shares, the ranks must be placed first: workers would fill up
        an accelerator that a rank needs.
    Raises:
        ConfigError: the cluster does not have them: Ray would wait for ever.
    """
    _check_cpus(ranks, workers, int(cluster.get("CPU", 0)))
    of_ranks, of_workers = _accelerator(ranks, cluster), _accelerator(workers, cluster)
    rank_share, worker_share = 1.0, 1.0
    left = int(cluster.get(of_ranks, 0)) - ranks.count if of_ranks else 0
    if left < 0:
        raise ConfigError(
            f"{ranks.field}={ranks.count} needs as many {of_ranks}s, and the Ray cluster has {left + ranks.count}; "
            f"lower it, add nodes, or set {ranks.device_field}=cpu"
        )
    if of_workers and workers.count:
        left = left if of_workers == of_ranks else int(cluster[of_workers])
        if left:
            worker_share = _share(1.0, workers.count, left)
        else:
            rank_share, worker_share = _RANK_SHARE, _share(1 - _RANK_SHARE, workers.count, ranks.count)
    return (
        ActorResources(of_ranks, rank_share, ranks.num_threads),
        ActorResources(of_workers, worker_share, workers.num_threads),
    )


def _check_cpus(ranks: ActorNeeds, workers: ActorNeeds, available: int) -> None:
    """Every actor takes one CPU."""
    wanted = ranks.count + workers.count
    if wanted > available:
        raise ConfigError(
            f"{ranks.field}={ranks.count} and {workers.field}={workers.count} need {wanted} CPUs in all, and the Ray "
            f"cluster has {available}; lower them, or add nodes"
        )


def _accelerator(need: ActorNeeds, cluster: Mapping[str, float]) -> str | None:
    """Return Ray's name of what an actor runs on, or None for the CPU."""
    if need.device == "auto":
        return next((name for name in _ACCELERATORS.values() if cluster.get(name, 0) >= 1), None)
    name = _ACCELERATORS.get(need.device)
    if name is not None and need.count and cluster.get(name, 0) < 1:
        raise ConfigError(
            f"{need.device_field}={need.device} needs {name}s, and the Ray cluster has none; use auto or cpu, or add "
            "nodes that have some"
        )
    return name


def _share(whole: float, num_sharers: int, num_accelerators: int) -> float:
    """Divide, rounded down to what Ray counts in: ten-thousandths."""
    most = math.ceil(num_sharers / num_accelerators)
    return math.floor(whole / most * 10_000) / 10_000
