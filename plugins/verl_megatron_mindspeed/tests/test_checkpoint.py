"""Checkpoints under Hugging Face names: between divisions of the ranks, and between backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch.distributed as dist

from plugins.verl_megatron_mindspeed.tests.engines import LAYOUTS, WHOLE, new_driver
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.reference import furthest, make_sequences

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist

SCHEDULE = {"warmup_steps": 4, "weight_decay": 0.1}
FSDP: dict[str, Any] = {"backend": "fsdp2"}


def _driver(folder: Path, rank: int, settings: dict[str, Any]) -> Driver:
    if settings == FSDP:
        section = {**FSDP, "device": "cpu", "learning_rate": 1e-2, **SCHEDULE}
        return Driver(section, folder, rank, dist.get_world_size())
    return new_driver(folder, rank, **SCHEDULE, **settings)


def _go_on(driver: Driver) -> tuple[list[float], dict[str, torch.Tensor]]:
    losses = [driver.train(make_sequences(8, seed=seed)).loss for seed in (2, 3)]
    return losses, driver.weights()


def _save(
    rank: int, folder: Path, root: Path, settings: dict[str, Any], num_steps: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    driver = _driver(folder, rank, settings)
    for seed in range(num_steps):
        driver.train(make_sequences(8, seed=seed))
    store = CheckpointStore(root)
    store.save(driver.engine, num_steps)
    found = _go_on(driver)
    store.close()
    return found


def _resume(
    rank: int, folder: Path, root: Path, settings: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    driver = _driver(folder, rank, settings)
    store = CheckpointStore(root)
    store.load(driver.engine)
    store.close()
    return _go_on(driver)


DIVISIONS: Final[dict[str, dict[str, Any]]] = {**LAYOUTS, "fsdp2": FSDP}


@pytest.mark.thinned(one_in=3)
@pytest.mark.parametrize(
    ("source", "targets"),
    [
        ("tp", ("pp", "fsdp2")),
        ("dp", ("tp", "cp", "dp, whole optimizer")),
        ("fsdp2", ("tp, sequence", "dp")),
        *(pytest.param(source, tuple(DIVISIONS), marks=pytest.mark.nightly) for source in ("tp", "dp", "fsdp2")),
    ],
)
def test_a_run_goes_on_under_any_other_division(
    ranks: RankPool, model_folder: Path, tmp_path: Path, source: str, targets: tuple[str, ...]
) -> None:
    losses, weights = ranks.run(_save, model_folder, tmp_path, DIVISIONS[source], 2)[0]
    for name in targets:
        for found_losses, found in ranks.run(_resume, model_folder, tmp_path, DIVISIONS[name]):
            assert found_losses == pytest.approx(losses, abs=1e-5), name
            assert furthest(found, weights)[1] < 1e-5, name


@pytest.mark.thinned(one_in=2)
@pytest.mark.parametrize("settings", [{}, WHOLE])
def test_a_bfloat16_run_goes_on_bit_for_bit(
    ranks: RankPool, model_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    half = {"param_dtype": "bfloat16", **settings}
    losses, weights = ranks.run(_save, model_folder, tmp_path, half, 2)[0]
    for found_losses, found in ranks.run(_resume, model_folder, tmp_path, half):
        assert found_losses == losses
        assert differences(found, weights) == "none"


def test_a_state_without_a_step_is_complete(ranks: RankPool, model_folder: Path, tmp_path: Path) -> None:
    losses, weights = ranks.run(_save, model_folder, tmp_path, LAYOUTS["pp"], 0)[0]
    for found_losses, found in ranks.run(_resume, model_folder, tmp_path, LAYOUTS["dp"]):
        assert found_losses == pytest.approx(losses, abs=1e-5)
        assert furthest(found, weights)[1] < 1e-5


def _of_a_reference(rank: int, folder: Path, root: Path) -> str:
    trained = _driver(folder, rank, {"param_dtype": "bfloat16"})
    trained.train(make_sequences(8))
    expected = {name: master.bfloat16() for name, master in trained.weights().items()}
    store = CheckpointStore(root)
    store.save(trained.engine, 1, wait=True)
    reference = new_driver(folder, rank, param_dtype="bfloat16", forward_only=True)
    store.load(reference.engine)
    store.close()
    return differences(reference.weights(), expected)


def test_a_forward_only_engine_takes_the_weights_alone(ranks: RankPool, model_folder: Path, tmp_path: Path) -> None:
    assert ranks.run(_of_a_reference, model_folder, tmp_path) == ["none"] * 2
