"""Both backends keep the contract: so says the kit that comes with core. Beside this file is what only they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from verl_engine.testing.conformance import EngineConformance

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.dist
class TestFsdp2(EngineConformance):
    backend = "fsdp2"


@pytest.mark.dist
class TestFsdp2Padded(EngineConformance):
    backend = "fsdp2"
    settings: ClassVar[Mapping[str, Any]] = {"packing": False}
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/all_ranks",
        "accumulation/token_temperatures",
        "log_probs/own_positions",
        "log_probs/together",
        "deadlock/idle_ranks",
        "router_replay/given",
        "router_replay/said",
    )


@pytest.mark.nightly
class TestFsdp2PaddedInAll(TestFsdp2Padded):
    only: ClassVar[tuple[str, ...]] = ("accumulation", "log_probs", "modes", "deadlock/idle_ranks")


@pytest.mark.dist
class TestFsdp2SplitsSequences(EngineConformance):
    backend = "fsdp2"
    settings: ClassVar[Mapping[str, Any]] = {"sequence_parallel_size": 2, "logit_chunk": 4}
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/token_temperatures",
        "config/ranks",
        "log_probs/own_positions",
        "router_replay/given",
        "router_replay/said",
        "top_k",
    )


@pytest.mark.dist
class TestFsdp2Recomputes(EngineConformance):
    """A recomputation takes the experts of its forward."""

    backend = "fsdp2"
    settings: ClassVar[Mapping[str, Any]] = {"activation_checkpointing": True, "sequence_parallel_size": 2}
    only: ClassVar[tuple[str, ...]] = ("router_replay/given",)


@pytest.mark.dist
class TestFsdp2CopyOnEachRank(EngineConformance):
    backend = "fsdp2"
    settings: ClassVar[Mapping[str, Any]] = {"shard_ranks": 1}
    only: ClassVar[tuple[str, ...]] = ("weights/shard_replicas",)


@pytest.mark.dist
class TestFsdp1CopyOnEachRank(EngineConformance):
    backend = "fsdp"
    settings: ClassVar[Mapping[str, Any]] = {"shard_ranks": 1}
    only: ClassVar[tuple[str, ...]] = ("weights/shard_replicas",)


@pytest.mark.dist
class TestFsdp2KeepsParametersGathered(EngineConformance):
    backend = "fsdp2"
    settings: ClassVar[Mapping[str, Any]] = {"reshard_after_forward": False}
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/one_rank",
        "recovery/middle_micro_batch",
        "snapshots/exact",
        "weights/saved_folder",
    )


@pytest.mark.nightly
class TestFsdp2KeepsParametersGatheredInAll(TestFsdp2KeepsParametersGathered):
    only: ClassVar[tuple[str, ...]] = ("accumulation", "recovery", "snapshots/exact", "weights/saved_folder")


@pytest.mark.dist
class TestFsdp1(EngineConformance):
    """What FSDP1 does in its own way; the rest it shares with fsdp2."""

    backend = "fsdp"
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/all_ranks",
        "accumulation/bf16",
        "accumulation/rank_without_data",
        "accumulation/tied",
        "checkpoints/resume",
        "checkpoints/to_fewer_ranks",
        "deadlock",
        "gradient_sync",
        "loading/spec",
        "lora/adapter",
        "offload/each_part",
        "offload/gradients_between_micro_batches",
        "optimizer/adamw",
        "optimizer/clipping",
        "optimizer/not_finite",
        "recovery",
        "router_replay/given",
        "snapshots/exact",
        "top_k/given_ids",
        "weights",
    )


@pytest.mark.nightly
class TestFsdp1InAll(TestFsdp1):
    only: ClassVar[tuple[str, ...]] = ("",)


@pytest.mark.dist
class TestFsdp1Padded(EngineConformance):
    backend = "fsdp"
    settings: ClassVar[Mapping[str, Any]] = {"packing": False}
    only: ClassVar[tuple[str, ...]] = ("accumulation/one_rank", "log_probs/together", "modes")


@pytest.mark.nightly
class TestFsdp1PaddedInAll(TestFsdp1Padded):
    only: ClassVar[tuple[str, ...]] = ("accumulation", "log_probs", "modes", "deadlock/idle_ranks")


@pytest.mark.dist
class TestFsdp1KeepsParametersGathered(EngineConformance):
    backend = "fsdp"
    settings: ClassVar[Mapping[str, Any]] = {"reshard_after_forward": False}
    only: ClassVar[tuple[str, ...]] = ("accumulation/all_ranks", "recovery/backward", "snapshots/exact")


@pytest.mark.nightly
class TestFsdp1KeepsParametersGatheredInAll(TestFsdp1KeepsParametersGathered):
    only: ClassVar[tuple[str, ...]] = ("accumulation", "recovery", "snapshots/exact", "weights/saved_folder")
