"""The engine's place among the data-parallel ranks is the one its config gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from core.tests.fake_distributions import write_distribution
from verl_engine import EngineConfig, EngineWorker
from verl_engine.contract.errors import ConfigError, PluginError
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.host.engine_section import validate_engine_section

if TYPE_CHECKING:
    from pathlib import Path

HOOKS = """
from contextlib import nullcontext
from typing import Literal

from core.tests.fake_engine import SPEC as TOY, FakeEngine
from dataclasses import replace
from verl_engine import EngineConfig, OptimizerStep, hookimpl
from verl_engine.contract.errors import ConfigError


class SplitConfig(EngineConfig):
    backend: Literal["toy"] = "toy"
    split: int = 2

    def data_parallel_ranks(self, world_size):
        return tuple(rank // self.split for rank in range(world_size))

    def validate_world(self, world_size):
        if world_size % self.split:
            raise ConfigError(f"engine.split={self.split} does not divide the {world_size} ranks")


SPEC = replace(TOY, config_class=SplitConfig)


@hookimpl
def engine_create(config, model_folder, role):
    assert role != "never reached"
    return FakeEngine(rank=1, size=2)  # as rank 2 or 3 of four that split by two, or as rank 1 of two that do not


@hookimpl
def engine_gradient_sync(engine, is_last_micro_batch):
    return nullcontext()


@hookimpl
def engine_optimizer_step(engine):
    return OptimizerStep(grad_norm=1.0, applied=True, learning_rate=0.1)
"""


@pytest.fixture
def folder(site: Path) -> Path:
    write_distribution(
        site, "toy-engine", {BACKENDS_GROUP: {"toy": "toy_split_hooks"}}, modules={"toy_split_hooks": HOOKS}
    )
    return site


def config(split: int) -> EngineConfig:
    return validate_engine_section({"backend": "toy", "learning_rate": 0.1, "split": split})


@pytest.mark.parametrize(("split", "rank", "world_size"), [(2, 2, 4), (2, 3, 4), (1, 1, 2)])
def test_an_engine_in_its_place_is_taken(folder: Path, split: int, rank: int, world_size: int) -> None:
    worker = EngineWorker(config(split), folder, rank, world_size)
    worker.create()
    assert worker.engine.data_parallel.rank == 1


@pytest.mark.parametrize(
    ("split", "rank", "world_size", "place"),
    [
        (2, 1, 4, r"rank 1 has data_parallel rank 1 of 2.*\(0, 0, 1, 1\), gives it 0 of 2"),
        (1, 1, 3, r"rank 1 has data_parallel rank 1 of 2.*\(0, 1, 2\), gives it 1 of 3"),
    ],
)
def test_an_engine_that_takes_another_share_is_a_bug_of_the_backend(
    folder: Path, split: int, rank: int, world_size: int, place: str
) -> None:
    worker = EngineWorker(config(split), folder, rank, world_size)
    with pytest.raises(PluginError, match=rf"backend toy: the engine of {place}.*bug of the backend"):
        worker.create()
    with pytest.raises(RuntimeError, match=r"create\(\) has not been called"):
        _ = worker.engine


def test_ranks_that_do_not_divide_are_refused_before_anything_is_built(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.split=2 does not divide the 3 ranks"):
        EngineWorker(config(2), folder, 0, 3).create("never reached")
