"""What a job takes from the machine it starts on: a port, and shared memory."""

from __future__ import annotations

import errno
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from verl_async.config import SftJob, TrainJob
    from verl_async.model_folder import WeightSizes

SHM_FOLDER: Final = Path("/dev/shm")  # noqa: S108  (the machine's shared memory, not a temporary file of ours)
_SLOW_STORE_BYTES: Final = 10**10
"""Up to here Ray keeps its object store in /tmp where /dev/shm has no room; a larger one it refuses."""
_ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2}
_MOST_PROCESSES: Final = 512
_MIB: Final = 2**20


def check_port(job: TrainJob | SftJob) -> None:
    """Check that the trainer's port is free, where one is set and the job runs on this machine.

    Raises:
        ConfigError: another process listens on it, or it may not be used.
    """
    port = job.trainer.master_port
    if port is None or job.ray.address is not None:
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the process group's own server does: connections of an earlier job that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            in_use = error.errno == errno.EADDRINUSE
            reason = "is in use on this machine" if in_use else f"cannot be used: {error.strerror}"
            raise ConfigError(
                f"trainer.master_port={port} {reason}; leave it out to take a free port, choose another one, or end "
                f"the process that holds it (`ss -ltnp 'sport = :{port}'` names it)"
            ) from error


def check_processes(job: TrainJob | SftJob) -> None:
    """Check that a job that runs on this machine alone has a number of processes that one machine can hold.

    Raises:
        ConfigError: far more than that.
    """
    wanted = job.trainer.num_ranks + job.rollout.num_workers
    if job.ray.address is None and wanted > _MOST_PROCESSES:
        raise ConfigError(
            f"trainer.num_ranks={job.trainer.num_ranks} and rollout.num_workers={job.rollout.num_workers} are {wanted} "
            f"processes on this machine; at most {_MOST_PROCESSES} are started on one: lower them, or set ray.address"
        )


def free_shared_memory() -> int | None:
    """Free bytes of /dev/shm; None on a machine that has none."""
    return shutil.disk_usage(SHM_FOLDER).free if SHM_FOLDER.is_dir() else None


def check_shared_memory(job: TrainJob | SftJob, sizes: WeightSizes, *, syncs_weights: bool) -> list[str]:
    """Check that /dev/shm has room for the weight buckets and for Ray's object store.

    Args:
        job: the job.
        sizes: of its model.
        syncs_weights: whether weights are sent to rollout workers.
    Returns:
        A warning where Ray's object store will be slow.
    Raises:
        ConfigError: there is too little room; says how many bytes are free, how many are needed, and for what.
    """
    free = free_shared_memory()
    if free is None:
        return []
    buckets = 2 * _bucket_bytes(job, sizes) if syncs_weights and job.weight_sync.transport != "object_store" else 0
    store = job.ray.object_store_bytes if job.ray.address is None else 0
    if free >= buckets + store:
        return []
    if free < buckets or store > _SLOW_STORE_BYTES:
        needed = buckets + store
        size = -(-needed // 2**30)
        raise ConfigError(
            f"{SHM_FOLDER} has {free} bytes free, but the job needs {needed}: {buckets} for two weight buckets "
            f"(weight_sync.bucket_bytes={job.weight_sync.bucket_bytes}) and {store} for Ray (ray.object_store_bytes); "
            "lower these settings, delete what earlier jobs left there, or give it more room "
            f"(docker run --shm-size={size}g, or mount -o remount,size={size}G {SHM_FOLDER})"
        )
    warning = (
        f"{SHM_FOLDER} has {free / _MIB:.0f} MiB free, too little for Ray's object store of {store / _MIB:.0f} MiB "
        "(ray.object_store_bytes): Ray keeps it in /tmp, which is slower"
    )
    return [warning]


def _bucket_bytes(job: TrainJob | SftJob, sizes: WeightSizes) -> int:
    """Size of one bucket: no larger than the model, and with room for its largest tensor."""
    element = _ELEMENT_BYTES[job.rollout.dtype]
    return max(min(job.weight_sync.bucket_bytes, sizes.total * element), sizes.largest * element)
