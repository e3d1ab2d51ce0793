"""Checkpoints of sharded engines: between numbers of ranks, between the two backends, with adapters, and exported."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoints.export import export_checkpoint
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.checkpoints.writer import CheckpointWriter
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.reference import furthest, make_sequences
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

pytestmark = pytest.mark.dist

Weights = dict[str, torch.Tensor]
LORA = {"rank": 2, "alpha": 6.0, "target_modules": ("q_proj", "down_proj")}


@pytest.fixture
def pools(rank_pools: RankPools) -> dict[int, RankPool]:
    """Worlds of one and of two ranks."""
    return {size: rank_pools.get(size) for size in (1, 2)}


def build(folder: Path, rank: int, world_size: int, settings: dict[str, Any]) -> Driver:
    section = {"backend": "fsdp2", "learning_rate": 1e-2, "device": "cpu", "weight_decay": 0.1, **settings}
    return Driver(section, folder, rank, world_size)


def save(rank: int, folder: Path, root: Path, world_size: int, settings: dict[str, Any]) -> tuple[Weights, Weights]:
    """Checkpoint after two steps; return the weights then, and after a third."""
    driver = build(folder, rank, world_size, settings)
    store = CheckpointStore(root, model_folder=folder)
    for seed in (0, 1):
        driver.train(make_sequences(8, seed=seed))
    store.save(driver.engine, 2)
    saved = driver.weights()
    driver.train(make_sequences(8, seed=2))
    store.close()
    return saved, driver.weights()


def resume(rank: int, folder: Path, root: Path, world_size: int, settings: dict[str, Any]) -> tuple[Weights, Weights]:
    driver = build(folder, rank, world_size, settings)
    store = CheckpointStore(root)
    store.load(driver.engine)
    store.close()
    loaded = driver.weights()
    driver.train(make_sequences(8, seed=2))
    return loaded, driver.weights()


CASES = {
    "to the same": (2, {}, 2, {}),
    "to fewer ranks": (2, {}, 1, {}),
    "to more ranks": (1, {}, 2, {}),
    "with adapters to fewer ranks": (2, {"lora": LORA}, 1, {"lora": LORA}),
    "in bfloat16 to more ranks": (1, {"param_dtype": "bfloat16"}, 2, {"param_dtype": "bfloat16"}),
    "with groups": (
        2,
        {"parameter_groups": [{"pattern": "norm", "learning_rate_scale": 0.5}]},
        1,
        {"parameter_groups": [{"pattern": "norm", "learning_rate_scale": 0.5}]},
    ),
    "with two copies of the weights": (2, {"shard_ranks": 1}, 1, {}),
    "to two copies of the weights": (2, {}, 2, {"shard_ranks": 1}),
    "with weights on the CPU": (2, {"cpu_offload": True}, 1, {}),
    "with a split sequence": (2, {"sequence_parallel_size": 2}, 2, {}),
    "from fsdp2 to fsdp": (2, {}, 2, {"backend": "fsdp"}),
    "from fsdp to fsdp2 on fewer ranks": (2, {"backend": "fsdp"}, 1, {}),
    "from fsdp2 to fsdp on more ranks": (1, {}, 2, {"backend": "fsdp"}),
    "from fsdp with adapters to fsdp2": (2, {"backend": "fsdp", "lora": LORA}, 2, {"lora": LORA}),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_bit_equal_and_training_goes_on(
    tmp_path: Path, pools: dict[int, RankPool], case: str, tied: bool
) -> None:
    num_saving, settings, num_loading, other_settings = CASES[case]
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    root = tmp_path / "root"
    saved, expected = pools[num_saving].run(save, folder, root, num_saving, settings)[0]
    loaded, found = pools[num_loading].run(resume, folder, root, num_loading, other_settings)[0]
    assert differences(loaded, saved) == "none"
    # AdamW's moments came too: without them the step would differ by about the learning rate, 1e-2.
    assert furthest(found, expected)[1] < (2e-3 if "bfloat16" in case else 1e-5)


def resume_changed(rank: int, folder: Path, root: Path, backend: str) -> tuple[list[tuple[float, float]], float]:
    """Save after a step; return rate and decay of each group in an engine with another config, and its report."""
    settings = {"backend": backend, "parameter_groups": [{"pattern": "norm", "learning_rate_scale": 0.5}]}
    driver = build(folder, rank, 2, settings)
    store = CheckpointStore(root)
    driver.train(make_sequences(8))
    store.save(driver.engine, 1, wait=True)
    changed = build(folder, rank, 2, settings | {"learning_rate": 1e-4, "weight_decay": 0.3})
    store.load(changed.engine)
    store.close()
    groups = [(group["lr"], group["weight_decay"]) for group in cast("Any", changed.engine).optimizer.param_groups]
    return groups, changed.train(make_sequences(8)).optimizer.learning_rate


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp"])
def test_a_resumed_run_trains_with_the_rate_and_decay_of_its_own_config(
    tmp_path: Path, model_folder: Path, pools: dict[int, RankPool], backend: str
) -> None:
    for groups, reported in pools[2].run(resume_changed, model_folder, tmp_path, backend):
        assert sorted(groups) == [(0.5e-4, 0.0), (1e-4, 0.3)]
        assert reported == 1e-4


def save_while_training(rank: int, folder: Path, root: Path) -> tuple[Weights, str]:
    """Let the write begin only after two more steps, in place, on the same shards."""
    driver = build(folder, rank, 2, {})
    driver.train(make_sequences(8, seed=0))
    before = driver.weights()
    may_write = threading.Event()
    write = CheckpointWriter.write

    def write_late(writer: CheckpointWriter) -> None:
        may_write.wait(60)
        write(writer)

    store = CheckpointStore(root)
    with mock.patch.object(CheckpointWriter, "write", write_late):
        store.save(driver.engine, 1)
        for seed in (1, 2):
            driver.train(make_sequences(8, seed=seed))
        may_write.set()
        store.wait()
    assert differences(driver.weights(), before) != "none"
    store.load(driver.engine)
    store.close()
    return before, differences(driver.weights(), before)


def test_shards_on_the_cpu_do_not_alias_the_checkpoint(
    tmp_path: Path, model_folder: Path, pools: dict[int, RankPool]
) -> None:
    assert [difference for _, difference in pools[2].run(save_while_training, model_folder, tmp_path)] == ["none"] * 2


@pytest.mark.thinned(1)
@pytest.mark.parametrize("settings", [{}, {"lora": LORA}], ids=["plain", "with adapters"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_an_export_is_what_the_engine_exports(
    tmp_path: Path, pools: dict[int, RankPool], tied: bool, settings: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    saved, _ = pools[2].run(save, folder, tmp_path / "root", 2, settings)[0]
    export_checkpoint(tmp_path / "root" / "step-00000002", tmp_path / "out", shard_bytes=10_000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    assert differences({name: entry.detach() for name, entry in model.named_parameters()}, saved) == "none"


def load_reference(rank: int, folder: Path, root: Path) -> Weights:
    driver = build(folder, rank, 2, {"forward_only": True})
    store = CheckpointStore(root)
    store.load(driver.engine)
    store.close()
    return driver.weights()


def test_a_reference_policy_takes_the_weights_of_a_training_checkpoint(
    tmp_path: Path, model_folder: Path, pools: dict[int, RankPool]
) -> None:
    saved, _ = pools[2].run(save, model_folder, tmp_path, 2, {})[0]
    assert differences(pools[2].run(load_reference, model_folder, tmp_path)[0], saved) == "none"


def load_into_adapted(rank: int, folder: Path, root: Path) -> str:
    driver = build(folder, rank, 2, {"lora": LORA})
    before = driver.weights()
    store = CheckpointStore(root)
    with pytest.raises(WeightsError) as caught:
        store.load(driver.engine)
    store.close()
    assert differences(driver.weights(), before) == "none"
    return str(caught.value)


def test_a_checkpoint_without_adapters_is_refused_by_an_engine_with_them(
    tmp_path: Path, model_folder: Path, pools: dict[int, RankPool]
) -> None:
    pools[2].run(save, model_folder, tmp_path, 2, {})
    for message in pools[2].run(load_into_adapted, model_folder, tmp_path):
        assert "q_proj.base_layer.weight is not in the checkpoint" in message
