"""What a checkpoint holds, down to what is easily forgotten."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from core.tests.test_checkpoint_refusals import edit_manifest
from core.tests.test_checkpoint_store import same, step, trained
from core.tests.test_module_engine import Model, PlainEngine, make, set_gradients, weights
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoints.manifest import CheckpointManifest
from verl_engine.engine.checkpoints.module import PART_OF
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.device import Device
from verl_engine.engine.loss_scaler import LossScaler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    store = CheckpointStore(tmp_path / "checkpoints")
    yield store
    store.close()


def test_saving_before_the_first_step_leaves_the_optimizer_as_it_is(store: CheckpointStore) -> None:
    saved, plain = make(), make()
    store.save(saved, 0, wait=True)
    assert not saved.optimizer.state
    assert all(parameter.grad is None for parameter in saved.parameters.values())
    store.load(resumed := make())
    for each in (saved, resumed, plain):
        step(each)
    assert same(saved, plain)
    assert same(resumed, plain)


def test_a_parameter_that_was_never_trained_has_no_state_after_a_resume(store: CheckpointStore) -> None:
    engine = make()
    engine.parameters["inner.bias"].grad = torch.ones(2)
    engine.optimizer_step()
    store.save(engine, 1, wait=True)
    store.load(resumed := make())
    (parameter,) = (entry for entry, state in resumed.optimizer.state.items() if state)
    assert parameter is resumed.parameters["inner.bias"]
    for each in (engine, resumed):
        step(each)
    assert same(engine, resumed)


def make_with(num_groups: int) -> PlainEngine:
    """Make an engine whose optimizer has both trained parameters in one group, or each in a part of it."""
    model = Model()
    matrix, bias = model.inner.weight, model.inner.bias
    parts = [{"params": [matrix], PART_OF: 0}, {"params": [bias], PART_OF: 0}]
    groups = parts if num_groups > 1 else [{"params": [matrix, bias]}]
    config = EngineConfig.model_validate({"backend": "plain", "learning_rate": 0.1})
    return PlainEngine(config, Device("cpu"), model, optimizer=torch.optim.AdamW(groups, lr=0.1))


def test_parts_of_a_group_come_as_one_and_go_back_into_parts(store: CheckpointStore) -> None:
    parts, one = make_with(2), make_with(1)
    for number, (saved, loaded) in enumerate(((parts, one), (one, parts))):
        step(saved, 2.0)
        store.save(saved, number, wait=True)
        step(loaded, -3.0)
        assert not same(saved, loaded)
        store.load(loaded)
        step(saved)
        step(loaded)
        assert same(saved, loaded)
    assert [group[PART_OF] for group in parts.optimizer.param_groups] == [0, 0]


def test_what_an_optimizer_keeps_in_its_groups_comes_back(store: CheckpointStore) -> None:
    engine, resumed = trained(), make(warmup_steps=5)
    for number, group in enumerate(engine.optimizer.param_groups):
        group["counted"] = number + 7
    for group in resumed.optimizer.param_groups:
        group["counted"] = 0
    store.save(engine, 1, wait=True)
    store.load(resumed)
    for found, expected in zip(resumed.optimizer.param_groups, engine.optimizer.param_groups, strict=True):
        assert {**found, "params": 0} == {**expected, "params": 0}


def test_a_resumed_run_trains_with_the_rate_and_settings_of_its_own_config(store: CheckpointStore) -> None:
    store.save(trained(), 2, wait=True)
    resumed = make(warmup_steps=5, learning_rate=0.001, weight_decay=0.5, betas=(0.5, 0.6), eps=1e-3)
    store.load(resumed)
    set_gradients(resumed, 1.0)
    used = [group["lr"] for group in resumed.optimizer.param_groups]
    assert used == [resumed.optimizer_step().learning_rate] * 2 == [pytest.approx(0.001 * 3 / 5)] * 2
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [pytest.approx(0.001 * 4 / 5)] * 2
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.5, 0.0]
    assert {(group["betas"], group["eps"]) for group in resumed.optimizer.param_groups} == {((0.5, 0.6), 1e-3)}


def test_options_that_an_optimizer_is_no_longer_made_with_do_not_come_back(store: CheckpointStore) -> None:
    def made(optimizer: Callable[..., torch.optim.Optimizer], **options: bool) -> PlainEngine:
        plain = make()
        trained = [entry for entry in plain.parameters.values() if entry.requires_grad]
        return PlainEngine(plain.config, plain.device, plain.module, optimizer=optimizer(trained, lr=0.1, **options))

    step(engine := made(torch.optim.AdamW, amsgrad=True))
    store.save(engine, 1, wait=True)
    store.load(resumed := made(torch.optim.Adam))
    step(resumed)
    (group,) = resumed.optimizer.param_groups
    assert (group["amsgrad"], group["decoupled_weight_decay"]) == (False, False)


def test_how_an_optimizer_computes_stays_that_of_this_machine(store: CheckpointStore) -> None:
    engine = trained()
    assert engine.optimizer.param_groups[0]["fused"]
    store.save(engine, 1, wait=True)
    plain = make(warmup_steps=5)
    optimizer = torch.optim.AdamW(
        [dict(group, fused=False) for group in plain.optimizer.param_groups], lr=0.1, fused=False
    )
    resumed = PlainEngine(plain.config, plain.device, plain.module, optimizer=optimizer)
    store.load(resumed)
    assert [group["fused"] for group in optimizer.param_groups] == [False, False]
    for each in (engine, resumed):
        step(each)
    for found, expected in zip(weights(resumed).values(), weights(engine).values(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_frozen_weight_is_saved_too(store: CheckpointStore) -> None:
    engine = trained()
    with torch.no_grad():
        engine.parameters["frozen"].fill_(5.0)
    store.save(engine, 1, wait=True)
    store.load(resumed := make(warmup_steps=5))
    assert resumed.parameters["frozen"].item() == 5.0
    assert not resumed.parameters["frozen"].requires_grad


def test_buffers_come_back_whether_a_model_folder_holds_them_or_not(store: CheckpointStore) -> None:
    engine = trained()
    engine.module.get_buffer("count").fill_(3.0)
    engine.module.get_buffer("scratch").fill_(4.0)
    store.save(engine, 1, wait=True)
    store.load(resumed := make(warmup_steps=5))
    assert resumed.module.get_buffer("count").item() == 3.0
    assert resumed.module.get_buffer("scratch").tolist() == [4.0, 4.0, 4.0]


def test_a_tied_weight_is_saved_once(store: CheckpointStore) -> None:
    store.save(trained(), 1, wait=True)
    manifest = CheckpointManifest.read(store.root / "step-00000001")
    assert sorted(manifest.weights) == ["count", "frozen", "inner.bias", "inner.weight"]
    store.load(resumed := make(warmup_steps=5))
    assert resumed.module.outer.weight is resumed.module.inner.weight  # type: ignore[union-attr]


def test_a_forward_only_engine_takes_the_weights_of_any_checkpoint_and_gives_them_alone(
    store: CheckpointStore,
) -> None:
    engine = trained()
    store.save(engine, 1, wait=True)
    reference = make(forward_only=True)
    before = reference.weights_id
    store.load(reference)
    assert same(reference, engine)
    assert reference.weights_id != before
    store.save(reference, 2, wait=True)
    assert CheckpointManifest.read(store.root / "step-00000002").contents == ("model", "buffers", "rng")
    with pytest.raises(WeightsError, match="is not in the checkpoint"):
        store.load(make(), 2)


def test_a_loss_scale_comes_back_and_stays_where_the_checkpoint_has_none(store: CheckpointStore) -> None:
    engine, resumed = make(), make()
    engine.loss_scaler, resumed.loss_scaler = LossScaler(), LossScaler()
    engine.loss_scaler.update(is_finite=False)
    store.save(make(), 1, wait=True)
    store.load(resumed)
    assert resumed.loss_scaler.scale == 65536.0
    store.save(engine, 2, wait=True)
    store.load(resumed)
    assert resumed.loss_scaler.scale == 32768.0
    store.load(make())


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.random())  # noqa: NPY002 - the global one


def test_random_numbers_of_torch_python_and_numpy_go_on(store: CheckpointStore) -> None:
    draw()
    store.save(trained(), 1)
    expected = draw()
    store.load(make(warmup_steps=5))
    assert draw() == expected


def test_on_another_number_of_ranks_random_numbers_are_seeded_anew_the_same_way(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(trained(), 1, wait=True)
    edit_manifest(store, world_size=4)
    found = []
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            info = store.load(make(warmup_steps=5))
            assert (info.world_size, info.rng) == (4, "seeded anew")
            found.append(draw())
    assert found[0] == found[1]
    assert "saved by 4 ranks, these are 1: random numbers are seeded anew" in caplog.text


def test_the_manifest_says_what_is_there(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (model / name).write_text("{}", encoding="utf-8")
    store = CheckpointStore(tmp_path / "root", model_folder=model)
    store.save(trained(lora={"rank": 4, "alpha": 8.0}), 12, {"a": 1}, wait=True)
    folder = tmp_path / "root" / "step-00000012"
    manifest = CheckpointManifest.read(folder)
    assert (manifest.step, manifest.backend, manifest.world_size) == (12, "plain", 1)
    assert manifest.contents == ("model", "buffers", "optimizer", "schedule", "rng")
    assert manifest.lora is not None
    assert (manifest.lora.rank, manifest.lora.alpha) == (4, 8.0)
    assert (manifest.weights["inner.weight"].shape, manifest.weights["inner.weight"].dtype) == ((2, 2), "float32")
    assert sorted(path.name for path in (folder / "model").iterdir()) == ["config.json", "tokenizer.json"]
