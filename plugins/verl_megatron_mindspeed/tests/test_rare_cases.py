"""Batches and uses that are rare, on ranks that divide the model in every way, against one process."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch
import torch.distributed as dist

from plugins.verl_megatron_mindspeed.tests.engines import LAYOUTS, WHOLE, another_driver, forget_groups, new_driver
from plugins.verl_megatron_mindspeed.tests.model_families import write_family
from plugins.verl_megatron_mindspeed.tests.prepared_ranks import prepared
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import BatchError, UnsupportedError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.worker import EngineWorker
from verl_engine.testing.conformance.driver import differences
from verl_engine.testing.conformance.reference import make_sequences, weighted_loss
from verl_engine.testing.conformance.values import value_loss
from verl_megatron_mindspeed.config import MegatronConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput
    from verl_engine.testing.conformance.driver import Driver
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools

pytestmark = pytest.mark.dist

OVERLAP: Final = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EXPERTS: Final = {"expert_parallel_size": 2}
DIVIDED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    **{name: ("dense", settings) for name, settings in LAYOUTS.items()},
    "vpp": ("dense", {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}),
    "ep": ("experts", EXPERTS),
    "ep, sequence": ("experts", {**EXPERTS, **LAYOUTS["tp, sequence"], "expert_tensor_parallel_size": 1}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dense model of four layers, and a mixture of experts."""
    root = tmp_path_factory.mktemp("models")
    return {
        "dense": write_family(root / "dense", "qwen3, tied", num_hidden_layers=4),
        "experts": write_family(root / "experts", "qwen3_moe"),
    }


@pytest.fixture(scope="module")
def alone(rank_pools: RankPools, folders: dict[str, Path]) -> dict[str, list[float]]:
    """What one process makes of the odd batches."""
    return {name: prepared(rank_pools, 1).run(train_on_odd_lengths, folder, {})[0] for name, folder in folders.items()}


def sequence(length: int, seed: int) -> Sequence:
    """Draw one whose tokens are all in the loss, but for the first."""
    random = np.random.default_rng(seed)
    mask = np.arange(length) > 0
    return Sequence(random.integers(0, 32, length), mask, {"weight": random.normal(size=length).astype(np.float32)})


ODD_LENGTHS: Final = ((1, 2), (1,), (1, 1, 3), (600,), (5, 1, 70))
"""Of the micro-batches of the steps, each of one sequence; at the end of each step comes one of four tokens."""


def train_on_odd_lengths(rank: int, folder: Path, settings: dict[str, Any]) -> list[float]:
    """Give all to data rank 0, and as many empty micro-batches to others; return losses, norms and log-probs."""
    driver = new_driver(folder, rank, **settings)
    beyond = Sequence(np.array([1, 33]), np.array([False, True]))  # 33 is a row that fills up the vocabulary
    with pytest.raises(BatchError, match="token id 33 is beyond the model's vocabulary of 33"):
        driver.infer([beyond])
    found = []
    for lengths in ODD_LENGTHS:
        batch = [sequence(length, seed) for seed, length in enumerate((*lengths, 4))]
        is_first = driver.engine.data_parallel.rank == 0
        report = driver.step([[each] if is_first else [] for each in batch])
        log_probs = driver.infer(batch, 0.7)
        found += [report.loss, report.optimizer.grad_norm, *(float(each.mean()) for each in log_probs)]
    return found


@pytest.mark.thinned(one_in=3)
@pytest.mark.fault(36)
@pytest.mark.parametrize("name", DIVIDED)
def test_single_tokens_long_sequences_and_empty_micro_batches(
    ranks: RankPool, folders: dict[str, Path], alone: dict[str, list[float]], name: str
) -> None:
    kind, settings = DIVIDED[name]
    for found in ranks.run(train_on_odd_lengths, folders[kind], settings):
        assert found == pytest.approx(alone[kind], rel=1e-4, abs=1e-4)


@pytest.mark.fault(36, 37)
@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_virtual_stages_compute_the_same_two_hundred_times(
    ranks: RankPool, folders: dict[str, Path], alone: dict[str, list[float]]
) -> None:
    for run in range(200):
        for found in ranks.run(train_on_odd_lengths, folders["dense"], DIVIDED["vpp"][1]):
            assert found == pytest.approx(alone["dense"], rel=1e-4, abs=1e-4), f"run {run}"


class LossWithoutGraph:
    """Depends on no weight in the second micro-batch."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.count += 1
        loss, metrics = weighted_loss(output, batch)
        return (torch.zeros(()) if self.count == 2 else loss), metrics


class FailingLoss(LossWithoutGraph):
    """Raises in the second micro-batch."""

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().__call__(output, batch)
        if self.count == 2:
            raise ZeroDivisionError
        return loss, metrics


def train_on_odd_losses(rank: int, folder: Path, settings: dict[str, Any]) -> list[float]:
    """Return the norms of a step whose loss lacks a part, and of one after a step that failed."""
    driver = new_driver(folder, rank, **settings)
    # The same for every data-parallel rank, so that each lacks the same part.
    batches = [make_sequences(3, seed=seed) for seed in range(3)]
    norms = [driver.step(batches, LossWithoutGraph()).optimizer.grad_norm]
    with pytest.raises(ZeroDivisionError):
        driver.step(batches, FailingLoss())
    return [*norms, driver.step(batches).optimizer.grad_norm]


def test_a_loss_without_a_graph_adds_nothing_and_one_that_raises_leaves_nothing(
    ranks: RankPool, rank_pools: RankPools, folders: dict[str, Path]
) -> None:
    right = prepared(rank_pools, 1).run(train_on_odd_losses, folders["dense"], {})[0]
    for name in ("dp", "tp", "tp, sequence", "cp", "pp", "vpp"):
        for found in ranks.run(train_on_odd_losses, folders["dense"], DIVIDED[name][1]):
            assert found == pytest.approx(right, rel=1e-4), name


def turns(rank: int, folder: Path, **settings: Any) -> Iterator[list[torch.Tensor] | float]:
    """Build an engine, and use it turn by turn."""
    driver = another_driver(folder, rank, **settings)
    yield 0.0
    for seed in range(2):
        yield driver.infer(make_sequences(4))
        if not settings.get("forward_only"):
            loss_fn = value_loss if settings.get("head") == "value" else weighted_loss
            yield driver.step(driver.micro_batches(make_sequences(8, seed=seed)), loss_fn).optimizer.grad_norm
    yield driver.infer(make_sequences(4))


def one_by_one(rank: int, folder: Path, roles: list[dict[str, Any]]) -> list[list[Any]]:
    """Return what each of some engines gives where there is no other."""
    found = []
    for settings in roles:
        forget_groups()
        found.append(list(turns(rank, folder, **settings)))
    return found


def in_turns(rank: int, folder: Path, roles: list[dict[str, Any]]) -> list[list[Any]]:
    """Return what they give where all are used by turns."""
    forget_groups()
    rounds = zip_longest(*(turns(rank, folder, **settings) for settings in roles))
    return [[result for result in results if result is not None] for results in zip(*rounds, strict=True)]


LAYOUTS_OF_ROLES: Final = {
    "dp": (OVERLAP, OVERLAP, {}),
    "tp": (LAYOUTS["tp, sequence"],) * 3,
    "pp": (LAYOUTS["pp"],) * 3,
    "each its own": (LAYOUTS["tp, sequence"], LAYOUTS["pp"], {}),
    "each its own, context": (LAYOUTS["cp"], {}, {"tensor_parallel_size": 2}),
}


@pytest.mark.thinned(one_in=3)
@pytest.mark.parametrize("layouts", LAYOUTS_OF_ROLES.values(), ids=LAYOUTS_OF_ROLES)
def test_actor_reference_and_critic_of_one_process_compute_what_they_compute_alone(
    ranks: RankPool, folders: dict[str, Path], layouts: tuple[dict[str, Any], ...]
) -> None:
    actor, reference, critic = layouts
    roles = [actor, {**reference, "forward_only": True}, {**critic, "head": "value", "param_dtype": "bfloat16"}]
    alone = ranks.run(one_by_one, folders["dense"], roles)
    torch.testing.assert_close(ranks.run(in_turns, folders["dense"], roles), alone, rtol=0, atol=0)


def open_and_close(rank: int, folder: Path) -> tuple[list[float], list[int]]:
    """Use a worker twice in the process group of the ranks; return losses, and how many groups there are meanwhile."""
    forget_groups()
    config = MegatronConfig(device="cpu", learning_rate=1e-2, tensor_parallel_size=2)
    losses, num_groups = [], []
    for _ in range(2):
        num_groups.append(len(dist.distributed_c10d._world.pg_map))
        worker = EngineWorker(config, folder, rank, 2)
        worker.prepare()
        worker.create()
        num_groups.append(len(dist.distributed_c10d._world.pg_map))
        losses.append(worker.train_batch([make_sequences(4)], weighted_loss).loss)
        worker.close()
    return losses, num_groups


def test_a_closed_worker_ends_the_groups_of_its_engine_and_another_makes_them_anew(
    ranks: RankPool, folders: dict[str, Path]
) -> None:
    for losses, num_groups in ranks.run(open_and_close, folders["dense"]):
        assert losses[0] == losses[1]
        assert num_groups[0] == num_groups[2] < num_groups[1] == num_groups[3]


def _go_on(driver: Driver) -> list[float]:
    return [driver.train(make_sequences(8, seed=seed)).optimizer.grad_norm for seed in (2, 3)]


def swap_and_move(rank: int, folder: Path, root: Path, settings: dict[str, Any]) -> tuple[list[str], list[list[float]]]:
    """Go on after a swap of weights, after a move to the CPU and back, and from a checkpoint made meanwhile."""
    driver = new_driver(folder, rank, **settings)
    snapshots, store = driver.snapshots(), CheckpointStore(root)
    first = driver.weights()
    snapshots.save("first")
    for seed in range(2):
        driver.train(make_sequences(8, seed=seed))
    trained = driver.weights()
    with snapshots.swapped("first"):
        found = [differences(driver.weights(), first)]
    driver.engine.move(to_cpu=True)
    snapshots.save("trained")
    store.save(driver.engine, 2, wait=True)
    driver.engine.move(to_cpu=False)
    norms = [_go_on(driver)]
    driver.engine.move(to_cpu=True)
    snapshots.restore("trained")
    driver.engine.move(to_cpu=False)
    found.append(differences(driver.weights(), trained))
    resumed = new_driver(folder, rank, **settings)
    resumed.engine.move(to_cpu=True)
    with pytest.raises(UnsupportedError, match="parameters of this engine were moved to the CPU"):
        store.load(resumed.engine)
    resumed.engine.move(to_cpu=False, optimizer=False)
    store.load(resumed.engine)
    resumed.engine.move(to_cpu=False)
    found.append(differences(resumed.weights(), trained))
    store.close()
    norms.append(_go_on(resumed))
    return found, norms


@pytest.mark.thinned(one_in=2)
@pytest.mark.parametrize(
    "settings",
    [OVERLAP, {**LAYOUTS["tp, sequence"], "param_dtype": "bfloat16"}, {**LAYOUTS["pp"], **WHOLE}],
    ids=["dp, overlap", "tp, bfloat16", "pp"],
)
def test_swaps_moves_and_checkpoints_in_between_change_nothing(
    ranks: RankPool, folders: dict[str, Path], tmp_path: Path, settings: dict[str, Any]
) -> None:
    for found, (after, resumed) in ranks.run(swap_and_move, folders["dense"], tmp_path, settings):
        assert found == ["none"] * 3
        assert resumed == after


def save_trained(rank: int, folder: Path, root: Path, settings: dict[str, Any]) -> list[float]:
    """Train, save, and go on."""
    driver = new_driver(folder, rank, **settings)
    driver.train(make_sequences(8))
    store = CheckpointStore(root)
    store.save(driver.engine, 1, wait=True)
    store.close()
    return _go_on(driver)


def resume(rank: int, folder: Path, root: Path, settings: dict[str, Any]) -> list[float]:
    """Go on from that."""
    driver = new_driver(folder, rank, **settings)
    store = CheckpointStore(root)
    store.load(driver.engine)
    store.close()
    return _go_on(driver)


def test_experts_go_on_undivided_and_divided(
    ranks: RankPool, rank_pools: RankPools, folders: dict[str, Path], tmp_path: Path
) -> None:
    _, divided = DIVIDED["ep, sequence"]
    right = ranks.run(save_trained, folders["experts"], tmp_path, EXPERTS)[0]
    assert prepared(rank_pools, 1).run(resume, folders["experts"], tmp_path, {})[0] == pytest.approx(right, rel=1e-4)
    for found in ranks.run(resume, folders["experts"], tmp_path, divided):
        assert found == pytest.approx(right, rel=1e-4)
