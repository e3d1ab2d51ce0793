"""Snapshots, checkpoints and exports: the tests of fsdp2, on this engine and between the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from transformers import AutoModelForCausalLM

from plugins.verl_fsdp.tests import test_checkpoints, test_snapshots
from plugins.verl_fsdp_turbo.tests.on_ranks import forget_division
from verl_engine.engine.checkpoints.export import export_checkpoint
from verl_engine.engine.worker import EngineWorker
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import furthest
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

TURBO: Final[dict[str, Any]] = {"backend": "fsdp_turbo"}
KEPT_GATHERED: Final[dict[str, Any]] = {
    "fsdp_plan": {"apply_modules": {"model.layers.{*}": {"reshard_after_forward": False}}}
}


def kept_aside(rank: int, folder: Path, check: str, settings: dict[str, Any]) -> None:
    forget_division()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineWorker, "close", lambda _: None)  # it ends the process group, and the ranks stay
        getattr(test_snapshots, check)(rank, folder, TURBO | settings)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("check", "settings"),
    [
        ("after_inference", {"snapshot_memory": "shared"}),
        ("after_inference", KEPT_GATHERED),
        ("after_inference", {"offload_policy": True}),
        ("old_policy", {}),
        ("offloaded", {}),
        ("offloaded", {"fully_shard_parallel_size": 1}),
    ],
)
def test_weights_come_back_from_the_cpu(
    model_folder: Path, ranks: RankPool, check: str, settings: dict[str, Any]
) -> None:
    ranks.run(kept_aside, model_folder, check, settings)


def saved(rank: int, *arguments: Any) -> Any:
    forget_division()
    return test_checkpoints.save(rank, *arguments)


def resumed(rank: int, *arguments: Any) -> Any:
    forget_division()
    return test_checkpoints.resume(rank, *arguments)


CASES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "to copies on each rank": (TURBO, TURBO | {"fully_shard_parallel_size": 1}),
    "to weights on the CPU": (TURBO | {"fully_shard_parallel_size": 1}, TURBO | {"offload_policy": True}),
    "to fsdp2": (TURBO | {"offload_policy": True}, {}),
    "from fsdp2": ({}, TURBO),
}


@pytest.mark.thinned(one_in=2)
@pytest.mark.dist
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_goes_on_in_another_layout_and_engine(tmp_path: Path, ranks: RankPool, case: str) -> None:
    settings, others = CASES[case]
    folder = write_tiny_model(tmp_path / "model", tied=True)
    kept, expected = ranks.run(saved, folder, tmp_path / "root", 2, settings)[0]
    loaded, found = ranks.run(resumed, folder, tmp_path / "root", 2, others)[0]
    assert differences(loaded, kept) == "none"
    # AdamW's moments came too: without them the step would differ by about the learning rate, 1e-2.
    assert furthest(found, expected)[1] < 1e-5


@pytest.mark.dist
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_export_is_what_the_engine_has(tmp_path: Path, ranks: RankPool, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    kept, _ = ranks.run(saved, folder, tmp_path / "root", 2, TURBO)[0]
    export_checkpoint(tmp_path / "root" / "step-00000002", tmp_path / "out", shard_bytes=10_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert differences({name: entry.detach() for name, entry in model.named_parameters()}, kept) == "none"
