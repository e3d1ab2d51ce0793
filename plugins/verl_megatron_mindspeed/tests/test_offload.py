"""Parts of a Megatron engine on the CPU; on the CPU as device, buffers come and go as on an accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_megatron_mindspeed.tests.engines import WHOLE, engine_of, new_driver
from verl_engine.contract.errors import UnsupportedError
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import make_sequences

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def _held_bytes(rank: int, folder: Path) -> tuple[int, int, str]:
    """Return the bytes of Megatron's buffers with everything away, and again back, and the refusal meanwhile."""
    engine = engine_of(driver := new_driver(folder, rank))
    chunk = engine.training.chunks[0]
    tensors = [tensor for buffer in chunk.buffers for tensor in (buffer.param_data, buffer.grad_data)]
    engine.move(to_cpu=True)
    away = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    with pytest.raises(UnsupportedError) as refused:
        driver.train(make_sequences(8))
    engine.move(to_cpu=False)
    return away, sum(tensor.untyped_storage().nbytes() for tensor in tensors), str(refused.value)


def test_memory_is_given_back_and_training_refused_meanwhile(ranks: RankPool, model_folder: Path) -> None:
    for away, back, message in ranks.run(_held_bytes, model_folder):
        assert (away, back > 0) == (0, True)
        assert "engine.move(to_cpu=False, parameters=True, gradients=True)" in message


def _train_around(rank: int, folder: Path, settings: dict[str, Any]) -> str:
    """Import weights while all is away, after parameters were on another device; compare with an engine that stays."""
    other = {name: tensor + 0.01 for name, tensor in new_driver(folder, rank, **settings).weights().items()}
    weights = []
    for is_moved in (True, False):
        driver = new_driver(folder, rank, **settings)
        driver.train(make_sequences(8, seed=0))
        if is_moved:
            driver.engine.move(to_cpu=True)
            for parameter in engine_of(driver).model.chunks[0].parameters():
                own = parameter.data
                parameter.data = own.double()  # has the same effect on autograd as another device
                parameter.data = own
        driver.engine.load_full_weights(other.items())
        if is_moved:
            assert differences(driver.weights(), other) == "none"
            driver.engine.move(to_cpu=False)
        driver.train(make_sequences(8, seed=1))
        weights.append(driver.weights())
    return differences(*weights)


@pytest.mark.parametrize("settings", [{}, WHOLE, OVERLAP])
def test_a_parameter_that_was_on_another_device_still_adds_to_megatrons_gradient(
    ranks: RankPool, model_folder: Path, settings: dict[str, Any]
) -> None:
    # Autograd then makes it a new node, without Megatron's hook.
    assert ranks.run(_train_around, model_folder, settings) == ["none"] * 2


def _zero_while_away(rank: int, folder: Path) -> float:
    driver = new_driver(folder, rank)
    engine = engine_of(driver)
    buffer = engine.training.chunks[0].buffers[0]
    with engine.gradient_sync(False):
        buffer.grad_data.fill_(1.0)
    engine.move(to_cpu=True, parameters=False, optimizer=False)
    engine.zero_grad()
    engine.move(to_cpu=False)
    return float(buffer.grad_data.abs().sum())


def test_gradients_that_were_dropped_while_away_come_back_as_zeros(ranks: RankPool, model_folder: Path) -> None:
    assert ranks.run(_zero_while_away, model_folder) == [0.0, 0.0]


def _forward_only(rank: int, folder: Path) -> str:
    driver = new_driver(folder, rank, forward_only=True)
    before = driver.weights()
    driver.engine.move(to_cpu=True)
    with pytest.raises(UnsupportedError, match="parameters"):
        driver.infer(make_sequences(2))
    driver.engine.move(to_cpu=False)
    driver.infer(make_sequences(2))
    return differences(driver.weights(), before)


def test_a_forward_only_engine_moves_too(ranks: RankPool, model_folder: Path) -> None:
    assert ranks.run(_forward_only, model_folder) == ["none"] * 2
