"""The backend keeps the contract on a CPU: so says the kit that comes with core; beside this file, what only it has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from verl_engine.testing.conformance import EngineConformance

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.mark.dist
class TestMegatron(EngineConformance):
    """What Megatron does in its own way; what the core does for all engines is in fsdp2's kit, and in the nightly."""

    backend = "megatron"
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/all_ranks",
        "accumulation/bf16",
        "accumulation/normalizers",
        "accumulation/rank_without_data",
        "accumulation/report",
        "accumulation/token_temperatures",
        "checkpoints/random_numbers",
        "checkpoints/resume",
        "config",
        "deadlock",
        "determinism/ranks_agree",
        "forward_only",
        "gradient_sync",
        "loading",
        "log_probs/together",
        "modes",
        "offload/each_part",
        "offload/there_and_back",
        "optimizer/adamw",
        "optimizer/clipping",
        "optimizer/decay_vectors",
        "optimizer/fp16_overflow",
        "optimizer/not_finite",
        "recovery",
        "router_replay/given",
        "several_engines/in_turns",
        "snapshots/exact",
        "snapshots/offloaded",
        "top_k/given_ids",
        "values/gradient",
        "weights/import",
        "weights/saved_folder",
        "weights/shards",
        "weights/tied",
    )


@pytest.mark.nightly
class TestMegatronInAll(TestMegatron):
    only: ClassVar[tuple[str, ...]] = ("",)


@pytest.mark.dist
class TestPipeline(EngineConformance):
    """Where the schedule runs micro-batches through each other, and one rank alone computes the loss."""

    backend = "megatron"
    settings: ClassVar[Mapping[str, Any]] = {"pipeline_parallel_size": 2}
    only: ClassVar[tuple[str, ...]] = (
        "accumulation/all_ranks",
        "accumulation/report",
        "config/ranks",
        "gradient_sync/hook_calls",
        "optimizer/not_finite",
        "recovery/middle_micro_batch",
        "top_k/given_ids",
        "values/gradient",
    )


@pytest.mark.nightly
class TestPipelineInMore(TestPipeline):
    only: ClassVar[tuple[str, ...]] = ("accumulation/token_temperatures", "recovery", "top_k")


@pytest.mark.dist
class TestSplitVocabulary(EngineConformance):
    """Where ranks hold a part of each matrix, and the same norms."""

    backend = "megatron"
    settings: ClassVar[Mapping[str, Any]] = {"tensor_parallel_size": 2}
    only: ClassVar[tuple[str, ...]] = (
        "config/ranks",
        "optimizer/decay_vectors",
        "top_k",
        "weights/shard_replicas",
    )


@pytest.mark.nightly
class TestSplitSequences(EngineConformance):
    """Where ranks hold a part of each sequence."""

    backend = "megatron"
    settings: ClassVar[Mapping[str, Any]] = {"context_parallel_size": 2}
    only: ClassVar[tuple[str, ...]] = ("accumulation/token_temperatures", "config/ranks", "top_k")


REPLAY = ("router_replay/given", "router_replay/said")


@pytest.mark.dist
class TestSplitExperts(EngineConformance):
    """Where given experts are on other ranks, and tokens are divided too."""

    backend = "megatron"
    settings: ClassVar[Mapping[str, Any]] = {
        "expert_parallel_size": 2,
        "tensor_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
        "recompute": "selective",
        "recompute_modules": ["moe"],
    }
    only: ClassVar[tuple[str, ...]] = REPLAY


@pytest.mark.dist
class TestExpertsInPipeline(EngineConformance):
    """Where a micro-batch is recomputed when the forward of others has begun."""

    backend = "megatron"
    settings: ClassVar[Mapping[str, Any]] = {"pipeline_parallel_size": 2, "recompute": "full"}
    only: ClassVar[tuple[str, ...]] = REPLAY


@pytest.mark.nightly
class TestExpertsOfSplitSequences(EngineConformance):
    """Where ranks hold a part of each sequence."""

    backend = "megatron"
    settings: ClassVar[Mapping[str, Any]] = {"context_parallel_size": 2, "expert_parallel_size": 2}
    only: ClassVar[tuple[str, ...]] = REPLAY
