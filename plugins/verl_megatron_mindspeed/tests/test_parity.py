"""However ranks divide a model, they train it as one process does, and as plain transformers with torch's AdamW."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from plugins.verl_megatron_mindspeed.tests.engines import new_driver
from plugins.verl_megatron_mindspeed.tests.model_families import write_family
from plugins.verl_megatron_mindspeed.tests.prepared_ranks import prepared
from verl_engine.testing.conformance.optimizer import EPS
from verl_engine.testing.conformance.reference import ReferenceRun, furthest, make_sequences
from verl_engine.testing.conformance.values import value_loss

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

pytestmark = pytest.mark.dist

NUM_STEPS: Final = 3
TOLERANCE: Final = 1e-5
OPTIMIZER: Final[dict[str, Any]] = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0, "eps": EPS}
FOUR_LAYERS: Final[dict[str, Any]] = {"num_hidden_layers": 4}
MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "dense": ("qwen3", {}),
    "dense, tied": ("qwen3, tied", FOUR_LAYERS),
    "experts": ("qwen3_moe", {}),
}
TP: Final[dict[str, Any]] = {"tensor_parallel_size": 2}
SP: Final[dict[str, Any]] = {**TP, "sequence_parallel": True}
PP: Final[dict[str, Any]] = {"pipeline_parallel_size": 2}
VPP: Final[dict[str, Any]] = {**PP, "virtual_pipeline_parallel_size": 2}
OVERLAP: Final[dict[str, Any]] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "TP2": ("dense", TP),
    "TP2, tied": ("dense, tied", TP),
    "PP2": ("dense", PP),
    "PP2, tied": ("dense, tied", PP),
    "PP2, uneven": ("dense, tied", {**PP, "transformer_options": {"num_layers_in_first_pipeline_stage": 1}}),
    "VPP2": ("dense, tied", VPP),
    "DP2, distributed optimizer": ("dense", {}),
    "DP2, whole optimizer": ("dense", {"distributed_optimizer": False}),
    "DP2, overlap": ("dense", OVERLAP),
    "DP2, overlap of the reduction only": ("dense", {"overlap_grad_reduce": True, "distributed_optimizer": False}),
    "VPP2, overlap": ("dense, tied", {**VPP, **OVERLAP}),
    "TP2, sequence parallel": ("dense", SP),
    "TP2, sequence parallel, tied": ("dense, tied", SP),
    "CP2": ("dense", {"context_parallel_size": 2}),
    "DP2, experts": ("experts", {}),
    "EP2": ("experts", {"expert_parallel_size": 2}),
    "TP2, sequence parallel, experts": ("experts", SP),
    "EP2, TP2, sequence parallel": ("experts", {**SP, "expert_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "CP2, EP2": ("experts", {"context_parallel_size": 2, "expert_parallel_size": 2}),
    "PP2, experts": ("experts", PP),
    "recompute full": ("dense", {**PP, "recompute": "full"}),
    "recompute full, sequence parallel": ("dense", {**SP, "recompute": "full", "recompute_method": "block"}),
    "recompute selective": ("dense", {**TP, "recompute": "selective"}),
}


@dataclass
class Record:
    """What came of a training."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    log_probs: dict[int, torch.Tensor]
    """After it, of each sequence of a batch."""


def train(rank: int, folder: Path, settings: dict[str, Any]) -> Record:
    """Train a few steps of three micro-batches per rank: the interleaved schedule has to fill them up."""
    driver = new_driver(folder, rank, **OPTIMIZER, **settings)
    reports = [driver.step(driver.micro_batches(make_sequences(8, seed=step), 3)) for step in range(NUM_STEPS)]
    log_probs = dict(enumerate(driver.infer(make_sequences(5, seed=9), 0.7)))
    return Record(
        [report.loss for report in reports],
        [report.optimizer.grad_norm for report in reports],
        driver.weights(),
        log_probs,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind; two ranks do not divide its vocabulary."""
    root = tmp_path_factory.mktemp("models")
    return {name: write_family(root / name, family, **changes) for name, (family, changes) in MODELS.items()}


@pytest.fixture(scope="module")
def alone(rank_pools: RankPools, folders: dict[str, Path]) -> dict[str, Record]:
    """What one process makes of each model."""
    return {name: prepared(rank_pools, 1).run(train, folder, {})[0] for name, folder in folders.items()}


def check(found: Record, right: Record) -> None:
    """Compare trainings."""
    assert found.losses == pytest.approx(right.losses, rel=TOLERANCE, abs=TOLERANCE)
    assert found.norms == pytest.approx(right.norms, rel=TOLERANCE)
    assert furthest(found.weights, right.weights)[1] <= TOLERANCE
    assert furthest(found.log_probs, right.log_probs)[1] <= TOLERANCE


@pytest.mark.thinned(one_in=3)
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_as_one_process_does(
    ranks: RankPool, folders: dict[str, Path], alone: dict[str, Record], name: str
) -> None:
    model, settings = CASES[name]
    for found in ranks.run(train, folders[model], settings):
        check(found, alone[model])


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        pytest.param("dense, tied", {**TP, **PP}, id="TP2, PP2"),
        *(
            pytest.param(model, settings, marks=pytest.mark.nightly)
            for model, settings in (
                ("dense, tied", {**SP, "context_parallel_size": 2, "recompute": "full"}),
                ("dense, tied", {**VPP, **OVERLAP}),  # and two data-parallel ranks
                ("experts", {**SP, "expert_parallel_size": 2}),  # ranks exchange tokens in parts of different lengths
                ("experts", {**OVERLAP, "expert_parallel_size": 2}),  # and two ranks that hold the same experts
            )
        ),
    ],
)
def test_four_ranks_train_as_one_process_does(
    rank_pools: RankPools, folders: dict[str, Path], alone: dict[str, Record], model: str, settings: dict[str, Any]
) -> None:
    for found in prepared(rank_pools, 4).run(train, folders[model], settings):
        check(found, alone[model])


@pytest.mark.parametrize("name", MODELS)
def test_one_process_trains_as_transformers_does(folders: dict[str, Path], alone: dict[str, Record], name: str) -> None:
    run = ReferenceRun(folders[name], **OPTIMIZER)
    weights = run.train([make_sequences(8, seed=step) for step in range(NUM_STEPS)], [1.0] * NUM_STEPS)
    assert alone[name].losses == pytest.approx(run.losses, rel=TOLERANCE, abs=TOLERANCE)
    assert alone[name].norms == pytest.approx(run.norms, rel=TOLERANCE)
    if name != "experts":  # there transformers keeps all experts of a layer in one tensor
        assert furthest({key: alone[name].weights[key] for key in weights}, weights)[1] <= TOLERANCE


@pytest.mark.thinned(one_in=2)
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [("bfloat16", SP), ("bfloat16", {**VPP, **OVERLAP}), ("float16", {"context_parallel_size": 2}), ("float16", PP)],
    ids=["bfloat16, SP2", "bfloat16, VPP2", "float16, CP2", "float16, PP2"],
)
def test_half_precision_stays_near(
    ranks: RankPool, folders: dict[str, Path], alone: dict[str, Record], dtype: str, settings: dict[str, Any]
) -> None:
    right = alone["dense, tied"]
    for found in ranks.run(train, folders["dense, tied"], {**settings, "param_dtype": dtype}):
        assert found.losses == pytest.approx(right.losses, abs=5e-2)
        # The norm of the third is so large that float16 may have to lower its loss scale first.
        assert found.norms[:2] == pytest.approx(right.norms[:2], rel=5e-2)


def critic(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[list[float], list[float], torch.Tensor]:
    """Train a critic, and return the values that it gives."""
    driver = new_driver(folder, rank, head="value", **OPTIMIZER, **settings)
    reports = [
        driver.step(driver.micro_batches(make_sequences(8, seed=step), 3), value_loss) for step in range(NUM_STEPS)
    ]
    norms = [report.optimizer.grad_norm for report in reports]
    return [report.loss for report in reports], norms, driver.output(make_sequences(1, seed=9)[0]).values


@pytest.fixture(scope="module")
def critic_alone(rank_pools: RankPools, folders: dict[str, Path]) -> tuple[list[float], list[float], torch.Tensor]:
    """What one process makes of a critic."""
    return prepared(rank_pools, 1).run(critic, folders["dense"], {})[0]


@pytest.mark.thinned(one_in=2)
@pytest.mark.parametrize("settings", [TP, SP, PP, {"context_parallel_size": 2}], ids=["TP2", "SP2", "PP2", "CP2"])
def test_two_ranks_train_a_critic_as_one_process_does(
    ranks: RankPool,
    folders: dict[str, Path],
    critic_alone: tuple[list[float], list[float], torch.Tensor],
    settings: dict[str, Any],
) -> None:
    for losses, norms, values in ranks.run(critic, folders["dense"], settings):
        assert losses == pytest.approx(critic_alone[0], abs=1e-5)
        assert norms == pytest.approx(critic_alone[1], abs=1e-4)
        torch.testing.assert_close(values, critic_alone[2], atol=1e-5, rtol=1e-5)
