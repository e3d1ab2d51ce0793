from __future__ import annotations

import pytest

from verl_async.ray.resources import ActorNeeds, ActorResources, divide_resources
from verl_engine.contract.errors import ConfigError


def ranks(count: int, device: str = "auto") -> ActorNeeds:
    return ActorNeeds("trainer.num_ranks", count, "engine.device", device, num_threads=2)


def workers(count: int, device: str = "auto") -> ActorNeeds:
    return ActorNeeds("rollout.num_workers", count, "rollout.device", device, num_threads=1)


def shares(found: tuple[ActorResources, ActorResources]) -> list[tuple[str | None, float]]:
    return [(each.accelerator, each.share) for each in found]


@pytest.mark.parametrize(
    ("num_ranks", "num_workers", "gpus", "rank_share", "worker_share"),
    [
        (2, 2, 4, 1.0, 1.0),  # enough for all
        (2, 2, 3, 1.0, 0.5),  # both workers on the one that is left
        (1, 3, 3, 1.0, 0.5),  # three on two: at most two on one
        (1, 1, 1, 0.6, 0.4),  # the usual workstation
        (2, 3, 2, 0.6, 0.2),  # none is left: at most two workers beside a rank
        (1, 0, 1, 1.0, 1.0),  # supervised, without evaluation
    ],
)
def test_accelerators_are_divided(
    num_ranks: int, num_workers: int, gpus: int, rank_share: float, worker_share: float
) -> None:
    found = divide_resources(ranks(num_ranks), workers(num_workers), {"CPU": 16, "GPU": gpus})
    assert shares(found) == [("GPU", rank_share), ("GPU", worker_share)]


def test_without_accelerators_all_run_on_the_cpu() -> None:
    assert shares(divide_resources(ranks(2), workers(2), {"CPU": 4})) == [(None, 1.0), (None, 1.0)]


def test_each_kind_has_the_device_it_asks_for() -> None:
    cluster = {"CPU": 4, "GPU": 1, "NPU": 1}
    assert shares(divide_resources(ranks(1, "cuda"), workers(2, "npu"), cluster)) == [("GPU", 1.0), ("NPU", 0.5)]
    assert shares(divide_resources(ranks(1, "cpu"), workers(1, "cuda"), cluster)) == [(None, 1.0), ("GPU", 1.0)]


def test_options_are_those_of_ray() -> None:
    gpu, npu = divide_resources(ranks(1, "cuda"), workers(2, "npu"), {"CPU": 4, "GPU": 1, "NPU": 1})
    assert (gpu.options()["num_gpus"], gpu.options()["resources"]) == (1.0, {})
    assert (npu.options()["num_gpus"], npu.options()["resources"]) == (0, {"NPU": 0.5})
    assert gpu.options()["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"


def test_two_ranks_never_share_an_accelerator() -> None:
    with pytest.raises(ConfigError, match=r"trainer.num_ranks=2 needs as many GPUs, and the Ray cluster has 1; lower"):
        divide_resources(ranks(2), workers(1), {"CPU": 8, "GPU": 1})


def test_what_the_cluster_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"rollout.device=cuda needs GPUs, and the Ray cluster has none"):
        divide_resources(ranks(1), workers(1, "cuda"), {"CPU": 8})
    with pytest.raises(ConfigError, match=r"trainer.num_ranks=2 and rollout.num_workers=1 need 3 CPUs in all"):
        divide_resources(ranks(2), workers(1), {"CPU": 2})
