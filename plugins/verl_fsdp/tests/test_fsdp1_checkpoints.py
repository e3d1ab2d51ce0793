"""Checkpoints of FSDP1: the same as fsdp2's, so that a run can change its backend and its number of ranks."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.reference import furthest, make_sequences
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.engine.base import Engine
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

pytestmark = pytest.mark.dist

SETTINGS: Final[dict[str, Any]] = {"warmup_steps": 3, "weight_decay": 0.1, "lr_schedule": "constant"}


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    """Two processes."""
    return rank_pools.get(2)


def build(rank: int, folder: Path, backend: str, **settings: Any) -> Driver:
    section = {"backend": backend, "learning_rate": 1e-2, "device": "cpu", **SETTINGS, **settings}
    return Driver(section, folder, rank, dist.get_world_size())


def save_checkpoint(engine: Engine, where: Path) -> None:
    with closing(CheckpointStore(where, timeout_s=60)) as store:
        store.save(engine, 1)


def load_checkpoint(engine: Engine, where: Path) -> None:
    with closing(CheckpointStore(where, timeout_s=60)) as store:
        store.load(engine)


def outline(value: Any) -> Any:
    """Say what a state consists of, without its numbers."""
    if isinstance(value, dict):
        return {key: outline(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [outline(entry) for entry in value]
    if isinstance(value, DTensor):
        return tuple(value.shape), str(value.dtype), value.placements, tuple(value.to_local().shape)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    return value


def outlines(rank: int, folder: Path, backend: str, num_steps: int, settings: dict[str, Any]) -> Any:
    driver = build(rank, folder, backend, **settings)
    for seed in range(num_steps):
        driver.train(make_sequences(8, seed=seed))
    return outline(driver.engine.state_dict())


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    "settings", [{}, {"lora": {"rank": 4}}, {"param_dtype": "float16"}], ids=["whole", "lora", "fp16"]
)
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_state_has_the_form_of_fsdp2s(
    tmp_path: Path, two_ranks: RankPool, tied: bool, num_steps: int, settings: dict[str, Any]
) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    own = two_ranks.run(outlines, folder, "fsdp", num_steps, settings)
    other = two_ranks.run(outlines, folder, "fsdp2", num_steps, settings)
    for found, expected in zip(own, other, strict=True):
        for part in expected:
            assert found[part] == expected[part], part
        assert found.keys() == expected.keys()


def save_after_two_steps(rank: int, folder: Path, backend: str, where: Path) -> dict[str, torch.Tensor]:
    """Save, make two more steps, and return the weights."""
    driver = build(rank, folder, backend)
    for seed in range(4):
        if seed == 2:
            save_checkpoint(driver.engine, where)
        driver.train(make_sequences(8, seed=seed))
    return driver.weights()


def resume_and_step_twice(rank: int, folder: Path, backend: str, where: Path) -> dict[str, torch.Tensor]:
    driver = build(rank, folder, backend)
    load_checkpoint(driver.engine, where)
    for seed in (2, 3):
        driver.train(make_sequences(8, seed=seed))
    return driver.weights()


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("before", "after"), [("fsdp", "fsdp2"), ("fsdp2", "fsdp")])
@pytest.mark.parametrize(("num_before", "num_after"), [(2, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_the_other_backend_on_other_ranks(
    model_folder: Path, tmp_path: Path, before: str, after: str, num_before: int, num_after: int, rank_pools: RankPools
) -> None:
    pool = rank_pools.get(num_before)
    expected = pool.run(save_after_two_steps, model_folder, before, tmp_path / "step")[0]
    pool = rank_pools.get(num_after)
    for found in pool.run(resume_and_step_twice, model_folder, after, tmp_path / "step"):
        _, worst = furthest(found, expected)
        assert worst <= 1e-6


def copies_resume(rank: int, folder: Path, where: Path) -> str:
    """Save and resume where each half of the ranks has a copy."""
    driver, resumed = (build(rank, folder, "fsdp", shard_ranks=2) for _ in range(2))
    driver.train(make_sequences(8))
    save_checkpoint(driver.engine, where)
    load_checkpoint(resumed.engine, where)
    for each in (driver, resumed):
        each.train(make_sequences(8, seed=1))
    return differences(resumed.weights(), driver.weights())


def test_a_run_in_several_copies_resumes_bit_for_bit(model_folder: Path, tmp_path: Path, rank_pools: RankPools) -> None:
    pool = rank_pools.get(4)
    assert pool.run(copies_resume, model_folder, tmp_path / "step") == ["none"] * 4


def resume_other_optimizer(rank: int, folder: Path, where: Path) -> str:
    """Save and resume with an optimizer whose state has another form."""
    settings = {"optimizer": "torch.optim.SGD", "optimizer_options": {"momentum": 0.9}}
    driver, resumed = (build(rank, folder, "fsdp", **settings) for _ in range(2))
    driver.train(make_sequences(8))
    save_checkpoint(driver.engine, where)
    load_checkpoint(resumed.engine, where)
    for each in (driver, resumed):
        each.train(make_sequences(8, seed=1))
    return differences(resumed.weights(), driver.weights())


def test_a_run_with_momentum_resumes_bit_for_bit(model_folder: Path, tmp_path: Path, two_ranks: RankPool) -> None:
    assert two_ranks.run(resume_other_optimizer, model_folder, tmp_path / "step") == ["none"] * 2


class RowSums(torch.optim.SGD):
    """Keeps one number for all of a piece, as a vector: nothing that can be cut again."""

    def step(self, closure: Any = None) -> Any:
        """Step, and note."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.numel() > 1:
                    self.state[parameter]["sum"] = parameter.detach().sum().reshape(1)
        return super().step(closure)


def refuse(rank: int, folder: Path) -> str:
    driver = build(rank, folder, "fsdp", optimizer=f"{__name__}.RowSums")
    driver.train(make_sequences(8))
    with pytest.raises(UnsupportedError) as caught:
        driver.engine.state_dict()
    return str(caught.value)


def test_an_optimizer_whose_state_cannot_be_cut_again_is_refused(model_folder: Path, two_ranks: RankPool) -> None:
    for message in two_ranks.run(refuse, model_folder):
        assert "RowSums keeps sum of shape (1,)" in message
