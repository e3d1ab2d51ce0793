"""State kept aside and taken back: snapshots, checkpoints, whole weights in, moving to the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from plugins.verl_fsdp.tests.driving import Driver, take
from plugins.verl_fsdp.tests.reference import make_sequences
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.checkpoint import load_checkpoint, save_checkpoint
from verl_engine.engine.snapshots import Snapshots
from verl_engine.testing.ranks import run_ranks
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path


def step(driver: Driver, rank: int, world_size: int, seed: int) -> None:
    driver.step(take(make_sequences(8, seed=seed), [list(range(rank, 8, world_size))]))


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def snapshots_on_rank(rank: int, folder: Path) -> dict[str, Any]:
    """Save, train, swap, restore."""
    driver = Driver.create(folder)
    snapshots = Snapshots(driver.host, driver.engine)
    first = driver.weights()
    saved = snapshots.save("1", version=1)
    checksum = saved.checksum
    step(driver, rank, 2, seed=0)
    second = driver.weights()
    with snapshots.swapped("1"):
        inside = driver.weights()
    after = driver.weights()
    with pytest.raises(ZeroDivisionError), snapshots.swapped("1"):
        raise ZeroDivisionError
    after_failure = driver.weights()
    snapshots.restore("1")
    restored = driver.weights()
    driver.engine.move(to_cpu=True)
    driver.engine.move(to_cpu=False)
    moved = driver.weights()
    with pytest.raises(WeightsError, match=r"no weights were saved under '2'; saved are \['1'\]"):
        snapshots.restore("2")
    snapshots.drop("1")
    with pytest.raises(WeightsError, match="saved are none"):
        snapshots.restore("1")
    return {
        "untouched": checksum == saved.checksum,
        "trained": not same(first, second),
        "swapped": same(inside, first) and same(after, second) and same(after_failure, second),
        "restored": same(restored, first),
        "moved": same(moved, first),
    }


@pytest.mark.dist
def test_snapshots_are_independent_and_exact(model_folder: Path) -> None:
    for result in run_ranks(snapshots_on_rank, model_folder):
        assert all(result.values()), result


def train_and_save(rank: int, folder: Path, checkpoint: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Save after two steps, then make two more."""
    driver = Driver.create(folder, warmup_steps=3)
    for seed in range(2):
        step(driver, rank, world_size, seed)
    save_checkpoint(driver.engine, checkpoint)
    save_checkpoint(driver.engine, checkpoint)  # in place of the first
    for seed in range(2, 4):
        step(driver, rank, world_size, seed)
    return driver.weights()


def resume(rank: int, folder: Path, checkpoint: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Resume a fresh engine, then make two steps."""
    driver = Driver.create(folder, warmup_steps=3)
    load_checkpoint(driver.engine, checkpoint)
    for seed in range(2, 4):
        step(driver, rank, world_size, seed)
    return driver.weights()


@pytest.mark.dist
@pytest.mark.parametrize(("saved_on", "resumed_on"), [(2, 2), (2, 1), (1, 2)])
def test_a_resumed_run_goes_on_as_the_first(tmp_path: Path, model_folder: Path, saved_on: int, resumed_on: int) -> None:
    expected = run_ranks(train_and_save, model_folder, tmp_path / "step", saved_on, world_size=saved_on)[0]
    found = run_ranks(resume, model_folder, tmp_path / "step", resumed_on, world_size=resumed_on)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    if saved_on == resumed_on:
        assert same(found, expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)


def fresh_checkpoint(rank: int, folder: Path, checkpoint: Path) -> list[dict[str, torch.Tensor]]:
    """Train a step with and without a checkpoint before it."""
    plain, saved = Driver.create(folder), Driver.create(folder)
    save_checkpoint(saved.engine, checkpoint)
    for driver in (plain, saved):
        step(driver, rank, 2, seed=0)
    return [plain.weights(), saved.weights()]


@pytest.mark.dist
def test_a_checkpoint_before_the_first_step_changes_nothing(tmp_path: Path, model_folder: Path) -> None:
    for plain, saved in run_ranks(fresh_checkpoint, model_folder, tmp_path / "step"):
        assert same(plain, saved)


def import_weights(_rank: int, folder: Path, other: Path) -> dict[str, Any]:
    """Take another model's weights; refuse what does not fit."""
    target, source = Driver.create(folder), Driver.create(other)
    weights = source.weights()
    target.engine.load_full_weights(reversed(weights.items()))
    name, tensor = next(iter(weights.items()))
    messages = []
    for wrong in ([("no.such", tensor)], [(name, tensor[1:])], list(weights.items())[1:]):
        with pytest.raises(WeightsError) as caught:
            target.engine.load_full_weights(wrong)
        messages.append(str(caught.value))
    return {"same": same(target.weights(), weights), "messages": messages}


@pytest.mark.dist
@pytest.mark.parametrize("tied", [False, True])
def test_whole_weights_go_in(tmp_path: Path, tied: bool) -> None:
    folders = [write_tiny_model(tmp_path / str(seed), tied=tied, seed=seed) for seed in range(2)]
    for result in run_ranks(import_weights, *folders):
        assert result["same"]
        unknown, misshaped, missing = result["messages"]
        assert "no.such" in unknown
        assert "has shape (32, 32)" in misshaped
        assert "1 weights are missing: model.embed_tokens.weight" in missing


def load_nothing(_rank: int, folder: Path, checkpoint: Path) -> str:
    driver = Driver.create(folder)
    with pytest.raises(WeightsError) as caught:
        load_checkpoint(driver.engine, checkpoint)
    return str(caught.value)


@pytest.mark.dist
def test_a_folder_without_a_whole_checkpoint_is_refused(tmp_path: Path, model_folder: Path) -> None:
    (message,) = run_ranks(load_nothing, model_folder, tmp_path, world_size=1)
    assert "holds no whole checkpoint" in message
