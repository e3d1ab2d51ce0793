"""Nothing is freed, changed or read while it may still be on its way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from plugins.verl_megatron_mindspeed.tests.engines import LAYOUTS, new_driver
from plugins.verl_megatron_mindspeed.tests.late_communication import communicate_late
from plugins.verl_megatron_mindspeed.tests.model_families import write_family
from verl_engine.testing.conformance.reference import make_sequences

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool

pytestmark = pytest.mark.dist

CASES: Final[dict[str, dict[str, Any]]] = {
    "dp, overlap": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "tp, sequence": LAYOUTS["tp, sequence"],
    "pp": LAYOUTS["pp"],
    "vpp": {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers."""
    return write_family(tmp_path_factory.mktemp("model") / "dense", "qwen3, tied", num_hidden_layers=4)


def train(rank: int, folder: Path, settings: dict[str, Any]) -> list[float]:
    """Make two steps, each of four micro-batches of other lengths; return losses, norms and log-probs."""
    driver = new_driver(folder, rank, **settings)
    found = []
    for seed in range(2):
        batch = make_sequences(8, seed=seed)
        report = driver.step(driver.micro_batches(batch, 4))
        found += [report.loss, report.optimizer.grad_norm, *(float(each.sum()) for each in driver.infer(batch))]
    return found


def train_late(rank: int, folder: Path, settings: dict[str, Any], late_rank: int) -> list[float]:
    """Do that with late communication; one rank's sends are later than all others."""
    new_driver(folder, rank, **settings)  # imports all of Megatron that is used
    with pytest.MonkeyPatch.context() as patch:
        communicate_late(patch, sends=rank == late_rank)
        return train(rank, folder, settings)


@pytest.mark.thinned(one_in=2)
@pytest.mark.fault(36)
@pytest.mark.parametrize("name", CASES)
def test_late_communication_changes_no_number(ranks: RankPool, folder: Path, name: str) -> None:
    right = ranks.run(train, folder, CASES[name])
    for late_rank in range(2 if "pp" in name else 1):
        assert ranks.run(train_late, folder, CASES[name], late_rank) == right, f"rank {late_rank} is late"
