"""Snapshots of a Megatron model hold what the optimizer would write over restored weights: the masters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_megatron_mindspeed.tests.engines import WHOLE, engine_of, new_driver
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import make_sequences

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist

SETTINGS = [{}, WHOLE, {"overlap_grad_reduce": True, "overlap_param_gather": True}]


def _after_a_step_without_effect(rank: int, folder: Path, settings: dict[str, Any], offloaded: bool) -> str:
    driver = new_driver(folder, rank, param_dtype="bfloat16", **settings)
    snapshots = driver.snapshots()
    before = driver.weights()
    if offloaded:
        driver.engine.move(to_cpu=True)
    saved = snapshots.save("kept")
    assert any(name.endswith(".master") for name in saved.tensors)
    if offloaded:
        driver.engine.move(to_cpu=False)
    driver.train(make_sequences(8))
    assert differences(driver.weights(), before) != "none"
    if offloaded:
        driver.engine.move(to_cpu=True)
    snapshots.restore("kept")
    if offloaded:
        driver.engine.move(to_cpu=False)
    training = engine_of(driver).training
    training.config = training.config.model_copy(update={"learning_rate": 0.0})
    driver.train(make_sequences(8))
    return differences(driver.weights(), before)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_restored_bfloat16_weights_outlive_a_step_without_effect(
    ranks: RankPool, model_folder: Path, settings: dict[str, Any], offloaded: bool
) -> None:
    # Without masters in the snapshot the step writes the old weights again.
    assert ranks.run(_after_a_step_without_effect, model_folder, settings, offloaded) == ["none"] * 2
