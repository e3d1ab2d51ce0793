"""The backend keeps the contract, over the fake: so says the kit that comes with core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from verl_engine.testing.conformance import EngineConformance

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.dist
class TestFsdpTurbo(EngineConformance):
    """What the library does, and how it is loaded; the rest is shared with fsdp2."""

    backend = "fsdp_turbo"
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/all_ranks",
        "accumulation/bf16",
        "accumulation/one_rank",
        "accumulation/rank_without_data",
        "checkpoints/resume",
        "config",
        "deadlock",
        "gradient_sync",
        "loading",
        "optimizer/adamw",
        "optimizer/clipping",
        "optimizer/not_finite",
        "recovery/backward",
        "recovery/middle_micro_batch",
        "router_replay/given",
        "snapshots/exact",
        "top_k/given_ids",
        "weights/export",
        "weights/import",
        "weights/saved_folder",
        "weights/shards",
    )


@pytest.mark.nightly
class TestFsdpTurboInAll(TestFsdpTurbo):
    only: ClassVar[tuple[str, ...]] = ("",)


@pytest.mark.dist
class TestACopyOnEachRank(EngineConformance):
    backend = "fsdp_turbo"
    settings: ClassVar[Mapping[str, Any]] = {"fully_shard_parallel_size": 1}
    only: ClassVar[tuple[str, ...]] = ("accumulation/all_ranks", "optimizer/clipping", "weights/shard_replicas")


@pytest.mark.nightly
class TestACopyOnEachRankInAll(TestACopyOnEachRank):
    only: ClassVar[tuple[str, ...]] = ("accumulation", "optimizer/clipping", "weights/saved_folder")


@pytest.mark.dist
class TestOffloaded(EngineConformance):
    backend = "fsdp_turbo"
    settings: ClassVar[Mapping[str, Any]] = {"offload_policy": True, "memory": {"recompute": True}}
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/one_rank",
        "optimizer/clipping",
        "snapshots/independent",
        "recovery/backward",
        "router_replay/given",
    )


@pytest.mark.nightly
class TestOffloadedInAll(TestOffloaded):
    only: ClassVar[tuple[str, ...]] = ("accumulation", "optimizer/clipping", "snapshots/independent", "recovery")
