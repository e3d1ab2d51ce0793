"""Moving, cpu_offload and what stays gathered: snapshots, exports and imports meanwhile are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast
from unittest import mock

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from verl_engine.batch.packed import PackedBatch
from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.checkpoints.store import CheckpointStore
from verl_engine.engine.offload import Offload
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.reference import make_sequences, masked_log_probs, weighted_loss

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine

MOVED_MIDWAY: Final = [{}, {"param_dtype": "bfloat16"}, {"gradient_sync": "every_micro_batch"}]


def build(rank: int, folder: Path, **settings: Any) -> tuple[Driver, ShardedEngine]:
    section = {"backend": "fsdp2", "learning_rate": 1e-2, "device": "cpu", **settings}
    driver = Driver(section, folder, rank, 2)
    return driver, cast("ShardedEngine", driver.engine)


def copies_as_between_devices() -> Any:
    """Let a move make new tensors, as between two devices; on the CPU alone there is nothing to copy."""

    def copy(_: Offload, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    return mock.patch.multiple(Offload, _to_host=copy, _to_device=copy)


def require_same(first: Driver, second: Driver) -> None:
    found = differences(first.weights(), second.weights())
    assert found == "none", found


def moved_between_micro_batches(rank: int, folder: Path, settings: dict[str, Any]) -> None:
    """Move everything in the middle of an accumulation; what is unreduced is neither lost nor counted twice."""
    moved, engine = build(rank, folder, **settings)
    stayed, other = build(rank, folder, **settings)
    moved.train(make_sequences(8, seed=1))
    stayed.train(make_sequences(8, seed=1))
    batches = [
        PackedBatch.from_sequences(part, torch.device("cpu")) for part in moved.micro_batches(make_sequences(8), 3)
    ]
    for each in (engine, other):
        for index, batch in enumerate(batches):
            with each.gradient_sync(index == len(batches) - 1):
                weighted_loss(each.forward(batch, 1.0), batch)[0].backward()
            if each is engine and index < len(batches) - 1:
                held = [slot.get() for slot in engine.gradient_slots()]
                with copies_as_between_devices():
                    engine.move(to_cpu=True)
                    engine.move(to_cpu=False)
                back = [slot.get() for slot in engine.gradient_slots()]
                pairs = [(old, new) for old, new in zip(held, back, strict=True) if old is not None]
                assert pairs
                assert all(new is not None and new is not old and torch.equal(old, new) for old, new in pairs)
        each.optimizer_step()
    require_same(moved, stayed)


@pytest.mark.dist
@pytest.mark.parametrize("settings", MOVED_MIDWAY, ids=["unreduced", "unreduced_in_float32", "reduced"])
def test_gradients_moved_in_the_middle_of_an_accumulation_come_back(
    model_folder: Path, ranks: RankPool, settings: dict[str, Any]
) -> None:
    ranks.run(moved_between_micro_batches, model_folder, settings)


def storages(engine: ShardedEngine) -> list[tuple[int, int]]:
    """Where the shards are, and where fully_shard thinks they are."""
    found = []
    for module in engine.model.modules():
        if isinstance(module, FSDPModule):
            for group in cast("Any", module._get_fsdp_state())._fsdp_param_groups:
                for entry in group.fsdp_params:
                    local = entry.sharded_param.to_local()
                    if local.numel():
                        found.append((local.data_ptr(), entry._sharded_param_data.data_ptr()))
    return found


def moved_with_copies(rank: int, folder: Path, settings: dict[str, Any]) -> None:
    moved, engine = build(rank, folder, **settings)
    stayed, _ = build(rank, folder, **settings)
    snapshots = moved.snapshots()
    for driver in (moved, stayed):
        driver.train(make_sequences(8, seed=1))
        driver.infer(make_sequences(3))  # may leave blocks gathered
    parameters, before = dict(engine.parameters), storages(engine)
    held = [local for _, local in engine.local_weights()]  # or the allocator would give out their memory again
    with copies_as_between_devices():
        engine.move(to_cpu=True)
        assert all(engine.parameters[name] is parameter for name, parameter in parameters.items())
        away = storages(engine)
        assert all(live == known for live, known in away)
        assert not set(before) & set(away)
        assert len(held) >= len(before)
        require_same(moved, stayed)
        saved = snapshots.save("away")
        checksum = saved.checksum
        engine.move(to_cpu=True)  # once more: nothing is to be done
        assert storages(engine) == away
        engine.move(to_cpu=False)
    assert all(live == known for live, known in storages(engine))
    for driver in (moved, stayed):
        driver.train(make_sequences(8, seed=2))
    require_same(moved, stayed)
    assert saved.checksum == checksum
    snapshots.restore("away")
    pairs = zip(moved.infer(make_sequences(3)), stayed.infer(make_sequences(3)), strict=True)
    assert not all(torch.equal(old, new) for old, new in pairs)


@pytest.mark.dist
@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}, {"shard_ranks": 1}])
def test_a_snapshot_taken_while_parameters_are_away_is_independent_and_sharding_goes_on(
    model_folder: Path, ranks: RankPool, settings: dict[str, Any]
) -> None:
    ranks.run(moved_with_copies, model_folder, settings)


def use_while_away(rank: int, folder: Path) -> None:
    driver, engine = build(rank, folder)
    twin, _ = build(rank, folder)
    sequences = make_sequences(8)
    engine.move(to_cpu=True, gradients=False, optimizer=False)
    for use in (lambda: driver.train(sequences), lambda: driver.infer(sequences)):
        with pytest.raises(
            UnsupportedError, match=r"parameters of this engine were moved to the CPU; call engine\.move"
        ):
            use()
    engine.move(to_cpu=False)
    engine.move(to_cpu=True, parameters=False, optimizer=False)
    driver.infer(sequences)
    with pytest.raises(UnsupportedError, match="cannot run the model: gradients of this engine"):
        driver.train(sequences)
    engine.move(to_cpu=False)
    engine.move(to_cpu=True, parameters=False, gradients=False)
    with pytest.raises(UnsupportedError, match="cannot step the optimizer: optimizer of this engine"):
        driver.train(sequences)
    engine.zero_grad()
    engine.move(to_cpu=False)
    for each in (driver, twin):
        each.train(sequences)
    require_same(driver, twin)


@pytest.mark.dist
def test_what_needs_a_part_that_is_away_is_refused_and_works_again_once_it_is_back(
    model_folder: Path, ranks: RankPool
) -> None:
    ranks.run(use_while_away, model_folder)


def kept_gathered(rank: int, folder: Path, exported: Path) -> None:
    """Everything that reads or writes weights right after an inference that could have left blocks gathered."""
    driver, engine = build(rank, folder, reshard_after_forward=False)
    plain, _ = build(rank, folder)
    sequences = make_sequences(3)
    snapshots = driver.snapshots()
    first = driver.weights()
    before = driver.infer(sequences)
    snapshots.save("first")
    for each in (driver, plain):
        each.train(make_sequences(8))
    trained = driver.infer(sequences)
    require_same(driver, plain)
    engine.save_pretrained(exported)
    snapshots.restore("first")
    for found, expected in ((driver.infer(sequences), before), (driver.infer(sequences), before)):
        assert all(torch.equal(new, old) for new, old in zip(found, expected, strict=True))
    engine.load_full_weights(plain.weights().items())
    assert all(torch.equal(new, old) for new, old in zip(driver.infer(sequences), trained, strict=True))
    engine.load_full_weights(first.items())
    assert all(torch.equal(new, old) for new, old in zip(driver.infer(sequences), before, strict=True))


@pytest.mark.dist
def test_weights_kept_gathered_through_eval_are_not_used_after_a_restore_or_a_load(
    model_folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(kept_gathered, model_folder, tmp_path / "exported")
    from verl_engine.testing.conformance.reference import load_reference

    assert masked_log_probs(load_reference(tmp_path / "exported"), make_sequences(1)[0]).isfinite().all()


def sharded_on_both_dims(rank: int, folder: Path, root: Path) -> list[tuple[int, ...]]:
    def place(parameter: torch.nn.Parameter) -> Shard:
        return Shard(1 if parameter.ndim > 1 and parameter.shape[0] > parameter.shape[1] else 0)

    def shard(module: torch.nn.Module, **settings: Any) -> Any:
        return fully_shard(module, shard_placement_fn=place, **settings)

    with mock.patch("verl_fsdp.fsdp2.parallelize.fully_shard", shard):
        driver, engine = build(rank, folder)
    plain, _ = build(rank, folder)
    snapshots = driver.snapshots()
    first = driver.weights()
    snapshots.save("first")
    for each in (driver, plain):
        each.train(make_sequences(8))
    second = driver.weights()
    for name, expected in plain.weights().items():
        torch.testing.assert_close(second[name], expected, rtol=0, atol=1e-6)
    store = CheckpointStore(root, timeout_s=60.0)
    store.save(engine, 1)
    store.wait()
    snapshots.restore("first")
    assert differences(driver.weights(), first) == "none"
    store.load(engine)
    assert differences(driver.weights(), second) == "none"
    engine.load_full_weights(first.items())
    assert differences(driver.weights(), first) == "none"
    store.close()
    placements = {cast("Any", parameter).placements for parameter in engine.parameters.values()}
    return sorted(tuple(placement.dim for placement in each) for each in placements)


@pytest.mark.dist
def test_weights_sharded_on_different_dims_are_saved_and_restored(
    model_folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks.run(sharded_on_both_dims, model_folder, tmp_path / "checkpoints") == [[(0,), (1,)]] * 2


def offloaded(rank: int, folder: Path, root: Path) -> None:
    """Training, clipping, snapshots, checkpoints and export under cpu_offload, beside an engine without."""
    driver, engine = build(rank, folder, cpu_offload=True, max_grad_norm=0.1)
    plain, _ = build(rank, folder, max_grad_norm=0.1)
    for seed in (1, 2):
        reports = [each.train(make_sequences(8, seed=seed)) for each in (driver, plain)]
        assert reports[0].optimizer.grad_norm == pytest.approx(reports[1].optimizer.grad_norm, rel=1e-6)
        assert reports[0].optimizer.grad_norm > 0.1
    require_same(driver, plain)
    state = engine.state_dict()
    weights = [value for value in state["model"].values() if isinstance(value, DTensor)]
    assert weights
    assert all(weight.to_local().device.type == "cpu" for weight in weights)
    store = CheckpointStore(root, timeout_s=60.0)
    store.save(engine, 2)
    store.wait()
    snapshots = driver.snapshots()
    kept = driver.weights()
    saved = snapshots.save("kept")
    checksum = saved.checksum
    engine.move(to_cpu=True)  # they are there: nothing is moved, and training goes on
    driver.train(make_sequences(8, seed=3))
    engine.move(to_cpu=False)
    assert saved.checksum == checksum
    assert differences(driver.weights(), kept) != "none"
    snapshots.restore("kept")
    assert differences(driver.weights(), kept) == "none"
    driver.train(make_sequences(8, seed=4))
    store.load(engine)
    assert differences(driver.weights(), kept) == "none"
    store.close()
    for each in (driver, plain):
        each.train(make_sequences(8, seed=5))
    require_same(driver, plain)


@pytest.mark.dist
def test_state_dicts_snapshots_and_checkpoints_are_right_under_cpu_offload(
    model_folder: Path, ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(offloaded, model_folder, tmp_path / "checkpoints")


def live_and_kept(rank: int, folder: Path) -> int:
    driver, engine = build(rank, folder)
    live = {tensor.untyped_storage().data_ptr() for _, tensor in engine.local_weights() if tensor.numel()}
    snapshots = driver.snapshots()
    kept: dict[str, torch.Tensor] = dict(snapshots.save("kept").tensors)
    return len(live & {tensor.untyped_storage().data_ptr() for tensor in kept.values() if tensor.numel()})


@pytest.mark.dist
def test_no_tensor_of_a_snapshot_is_a_live_one_on_the_cpu(model_folder: Path, ranks: RankPool) -> None:
    assert ranks.run(live_and_kept, model_folder) == [0, 0]


def moved_on_gpu(rank: int, folder: Path) -> None:
    section = {"backend": "fsdp2", "learning_rate": 1e-2, "device": "cuda"}
    moved, stayed = (Driver(section, folder, rank, 1) for _ in range(2))
    engine = cast("ShardedEngine", moved.engine)
    for driver in (moved, stayed):
        driver.train(make_sequences(8, seed=1))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    engine.move(to_cpu=True)
    locals_ = [cast("Any", parameter).to_local() for parameter in engine.parameters.values()]
    assert all(tensor.device.type == "cpu" for tensor in locals_)
    assert all(tensor.is_pinned() for tensor in locals_ if tensor.numel())
    assert torch.cuda.memory_allocated() < 0.6 * held  # half of it is the twin's
    require_same(moved, stayed)
    engine.move(to_cpu=False)
    assert all(parameter.device.type == "cuda" for parameter in engine.parameters.values())
    for driver in (moved, stayed):
        driver.train(make_sequences(8, seed=2))
    require_same(moved, stayed)
    engine.move(to_cpu=True, gradients=False, optimizer=False)
    engine.move(to_cpu=False, gradients=False, optimizer=False)
    for driver in (moved, stayed):
        driver.train(make_sequences(8, seed=3))
    require_same(moved, stayed)


@pytest.mark.dist
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: nothing is moved between devices without one")
def test_moving_frees_the_gpu_and_training_goes_on_bit_for_bit(model_folder: Path, rank_pools: RankPools) -> None:
    pool = rank_pools.get(1, device="cuda")
    pool.run(moved_on_gpu, model_folder)


def offloaded_on_gpu(rank: int, folder: Path) -> None:
    section = {"backend": "fsdp2", "learning_rate": 1e-2, "device": "cuda", "cpu_offload": True}
    driver = Driver(section, folder, rank, 1)
    engine = cast("ShardedEngine", driver.engine)
    report = driver.train(make_sequences(8))
    assert report.optimizer.applied
    assert all(parameter.device.type == "cpu" for parameter in engine.parameters.values())
    assert all(cast("Any", parameter).to_local().is_pinned() for parameter in engine.parameters.values())
    assert driver.weights()
    kept = driver.snapshots().save("kept")
    assert kept.num_bytes


@pytest.mark.dist
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: cpu_offload keeps nothing apart without one")
def test_cpu_offload_keeps_shards_pinned_on_the_cpu_beside_a_gpu(model_folder: Path, rank_pools: RankPools) -> None:
    pool = rank_pools.get(1, device="cuda")
    pool.run(offloaded_on_gpu, model_folder)
