"""FSDP1's weights in and out: whole, in pieces, in snapshots, on the CPU; under Hugging Face names throughout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist

from plugins.verl_fsdp.tests.gradient_view import look_instead_of_stepping, units_of
from verl_engine.contract.errors import UnsupportedError, WeightsError
from verl_engine.engine.base import WeightShard, WeightSpec
from verl_engine.engine.weights.shards import assemble_weights
from verl_engine.testing.conformance.driver import Driver, differences, same
from verl_engine.testing.conformance.reference import load_reference, make_sequences, masked_log_probs
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine

pytestmark = pytest.mark.dist


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    """Two processes."""
    return rank_pools.get(2)


def build(rank: int, folder: Path, num_ranks: int = 2, **settings: Any) -> tuple[Driver, ShardedEngine]:
    """Build an engine with a rate at which a step shows."""
    driver = Driver({"backend": "fsdp", "learning_rate": 1e-2, "device": "cpu", **settings}, folder, rank, num_ranks)
    return driver, cast("ShardedEngine", driver.engine)


def describe(rank: int, folder: Path) -> tuple[list[tuple[str, tuple[int, ...], str]], list[str], list[str]]:
    """Return what is exported, what is trained, and what a snapshot holds."""
    driver, engine = build(rank, folder)
    specs = [(spec.name, spec.shape, str(spec.dtype)) for spec in engine.weight_specs()]
    return specs, list(engine.parameters), list(driver.snapshots().save("a").tensors)


@pytest.mark.parametrize("tied", [False, True])
def test_names_shapes_and_order_are_those_of_the_model_on_disk(tmp_path: Path, two_ranks: RankPool, tied: bool) -> None:
    folder = write_tiny_model(tmp_path / "model", tied=tied)
    model = load_reference(folder)
    expected = [(name, tuple(entry.shape), "torch.float32") for name, entry in model.named_parameters()]
    names = [name for name, _, _ in expected]
    for specs, parameters, kept in two_ranks.run(describe, folder):
        assert specs == expected
        assert parameters == names
        assert kept == [*names, *(name for name, _ in model.named_buffers())]


def count_gathers(rank: int, folder: Path) -> tuple[int, int, int]:
    """Export all weights; return the number of gathers, the entries of the largest, and those of the largest unit."""
    _, engine = build(rank, folder)
    names = [spec.name for spec in engine.weight_specs()]
    sizes = []
    gather: Any = dist.all_gather_single

    def counted(whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(whole.numel())
        return gather(whole, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", counted)
        for _ in engine.full_weights(names):
            pass
    return len(sizes), max(sizes), max(unit.numel for unit in units_of(engine))


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="older torch has another name for it")
def test_export_gathers_one_block_at_a_time(model_folder: Path, two_ranks: RankPool) -> None:
    """The embedding; two layers; what comes after them, of the same unit as the embedding."""
    for count, largest, unit in two_ranks.run(count_gathers, model_folder):
        assert count == 4
        assert unit <= largest <= unit + 64  # padding


def masters(rank: int, folder: Path, dtype: str) -> tuple[bool, set[str], str]:
    """Train in a low precision; say whether the weights exported are finer than it, and their dtypes."""
    driver, engine = build(rank, folder, param_dtype=dtype)
    driver.train(make_sequences(8))
    weights = driver.weights()
    finer = any(not torch.equal(tensor, tensor.to(getattr(torch, dtype)).float()) for tensor in weights.values())
    dtypes = {str(tensor.dtype) for tensor in weights.values()}
    engine.load_full_weights(weights.items())
    return finer, dtypes, differences(driver.weights(), weights)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_under_mixed_precision_the_masters_are_exported(model_folder: Path, two_ranks: RankPool, dtype: str) -> None:
    for found in two_ranks.run(masters, model_folder, dtype):
        assert found == (True, {"torch.float32"}, "none")


def log_probs_after_each_change(rank: int, folder: Path, other: Path, **settings: Any) -> list[list[torch.Tensor]]:
    """Change the weights in every way, each after an inference that gathered the former ones; infer again."""
    driver, engine = build(rank, folder, **settings)
    sequences = make_sequences(5)
    snapshots = driver.snapshots()
    snapshots.save("first")
    replacement = dict(load_reference(other).named_parameters())
    parts = [WeightShard(s.name, s.view_shape, s.offsets, s.tensor.clone()) for s in engine.weight_shards()]
    found = [driver.infer(sequences)]
    engine.load_full_weights(replacement.items())
    found.append(driver.infer(sequences))
    snapshots.restore("first")
    found.append(driver.infer(sequences))
    with snapshots.swapped("first"):
        driver.infer(sequences)
    engine.load_full_weights(replacement.items())
    driver.infer(sequences)
    engine.load_weight_shards(parts)
    found.append(driver.infer(sequences))
    state = engine.state_dict()
    engine.load_full_weights(replacement.items())
    driver.infer(sequences)
    engine.load_state_dict(state)
    found.append(driver.infer(sequences))
    return found


def infer_after_changes(rank: int, folder: Path, other: Path, reshard: bool) -> list[list[torch.Tensor]]:
    return log_probs_after_each_change(rank, folder, other, reshard_after_forward=reshard)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_inference_never_uses_weights_gathered_before_a_change(
    model_folder: Path, tmp_path: Path, two_ranks: RankPool, reshard_after_forward: bool
) -> None:
    """FSDP1 keeps gathered weights after a forward without backward, and would go on with them."""
    other = write_tiny_model(tmp_path / "other", seed=5)
    sequences = make_sequences(5)
    first, second = (
        [masked_log_probs(load_reference(folder), sequence) for sequence in sequences]
        for folder in (model_folder, other)
    )
    for found in two_ranks.run(infer_after_changes, model_folder, other, reshard_after_forward):
        for log_probs, expected in zip(found, (first, second, first, first, first), strict=True):
            torch.testing.assert_close(log_probs, expected, rtol=0, atol=5e-6)


def take_pieces(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[list[WeightShard], dict[str, torch.Tensor]]:
    """Train, and return this rank's pieces and the full weights; give the pieces back to another engine."""
    num_ranks = dist.get_world_size()
    driver, engine = build(rank, folder, num_ranks, **settings)
    driver.train(make_sequences(8))
    pieces = [WeightShard(s.name, s.view_shape, s.offsets, s.tensor.clone()) for s in engine.weight_shards()]
    fresh, fresh_engine = build(rank, folder, num_ranks, **settings)
    id_before = fresh_engine.weights_id
    fresh_engine.load_weight_shards(reversed(pieces))
    assert fresh_engine.weights_id != id_before
    assert same(fresh.weights(), driver.weights())
    for wrong in (pieces[1:], [*pieces, pieces[0]], [moved(pieces[0]), *pieces[1:]]):
        with pytest.raises(WeightsError):
            fresh_engine.load_weight_shards(wrong)
    return pieces, driver.weights()


def moved(shard: WeightShard) -> WeightShard:
    return WeightShard(shard.name, shard.view_shape, (shard.offsets[0] + 1,), shard.tensor)


@pytest.mark.parametrize(
    ("num_ranks", "settings"), [(1, {}), (2, {}), (3, {"param_dtype": "bfloat16"}), (4, {"shard_ranks": 2})]
)
def test_the_ranks_pieces_make_up_each_weight(
    model_folder: Path, num_ranks: int, settings: dict[str, Any], rank_pools: RankPools
) -> None:
    """Cut anywhere, in the middle of rows too, and empty on some ranks."""
    pool = rank_pools.get(num_ranks)
    results = pool.run(take_pieces, model_folder, settings)
    specs = [_spec(name, tensor) for name, tensor in results[0][1].items()]
    whole = dict(assemble_weights(specs, [piece for pieces, _ in results for piece in pieces]))
    assert list(whole) == [piece.name for piece in results[0][0]]
    for _, weights in results:
        assert same(whole, weights)
    if num_ranks > 1:
        assert any(piece.tensor.numel() == 0 for pieces, _ in results for piece in pieces)


def _spec(name: str, tensor: torch.Tensor) -> WeightSpec:
    return WeightSpec(name, tuple(tensor.shape), tensor.dtype)


def move_flat_tensors(rank: int, folder: Path, settings: dict[str, Any]) -> str:
    """Move to other storage in the middle of an accumulation, use what is away, move back and train on."""
    num_ranks = dist.get_world_size()
    (driver, engine), (twin, _) = (build(rank, folder, num_ranks, **settings) for _ in range(2))
    for each in (driver, twin):
        each.train(make_sequences(8))
    before = driver.weights()
    engine.move(to_cpu=True)
    offload: Any = engine._offload
    for to_cpu in (False, True):  # on the CPU there is nothing to copy: copy all the same
        offload._to_host = offload._to_device = lambda tensor: tensor.clone()
        engine.move(to_cpu=to_cpu)
    away = [unit.local for unit in units_of(engine)]
    kept = driver.snapshots().save("away")
    with pytest.raises(UnsupportedError, match="were moved to the CPU"):
        driver.infer(make_sequences(2))
    engine.zero_grad()
    engine.move(to_cpu=False)
    for unit, former in zip(units_of(engine), away, strict=True):
        assert unit.local.data_ptr() != former.data_ptr()
    assert same(driver.weights(), before)
    assert kept.num_bytes == driver.snapshots().save("back").num_bytes
    driver.infer(make_sequences(2))
    for each in (driver, twin):
        for seed in (1, 2):
            each.train(make_sequences(8, seed=seed))
    return differences(driver.weights(), twin.weights())


@pytest.mark.parametrize(
    "settings", [{}, {"reshard_after_forward": False}, {"param_dtype": "bfloat16"}, {"shard_ranks": 1}]
)
def test_training_goes_on_with_flat_tensors_that_were_moved(
    model_folder: Path, two_ranks: RankPool, settings: dict[str, Any]
) -> None:
    assert two_ranks.run(move_flat_tensors, model_folder, settings) == ["none", "none"]


def move_gradients(rank: int, folder: Path, settings: dict[str, Any]) -> str:
    """Move gradients, unreduced or reduced, between two micro-batches; return how the step differs without."""
    gradients = []
    for is_moved in (False, True):
        driver, engine = build(rank, folder, max_grad_norm=1e9, **settings)
        found = look_instead_of_stepping(engine)
        if is_moved:
            forward = engine.forward

            def moving(*args: Any, engine: ShardedEngine = engine, forward: Any = forward) -> Any:
                engine.move(to_cpu=True)
                offload: Any = engine._offload
                offload._to_host = offload._to_device = lambda tensor: tensor.clone()
                engine.move(to_cpu=False)
                return forward(*args)

            engine.forward = moving  # type: ignore[method-assign, assignment]
        driver.step(driver.micro_batches(make_sequences(12), 3))
        gradients += found
    return differences(*gradients)


@pytest.mark.parametrize("gradient_sync", ["last_micro_batch", "every_micro_batch"])
def test_gradients_of_an_accumulation_move_too(model_folder: Path, two_ranks: RankPool, gradient_sync: str) -> None:
    found = two_ranks.run(move_gradients, model_folder, {"gradient_sync": gradient_sync})
    assert found == ["none", "none"]


def forward_only(rank: int, folder: Path, other: Path) -> tuple[list[torch.Tensor], int, int]:
    """Load other weights into a reference policy, keep them aside, and infer."""
    driver, engine = build(rank, folder, forward_only=True)
    driver.infer(make_sequences(2))
    engine.load_full_weights(load_reference(other).named_parameters())
    snapshots = driver.snapshots()
    snapshots.save("kept")
    engine.load_full_weights(load_reference(folder).named_parameters())
    snapshots.restore("kept")
    order = cast("Any", engine.model)._exec_order_data.handles_post_forward_order
    found = driver.infer(make_sequences(5))
    return found, len(order), sum(parameter.requires_grad for parameter in engine.parameters.values())


def test_a_forward_only_engine_takes_weights_and_keeps_no_record_of_its_forwards(
    model_folder: Path, tmp_path: Path, two_ranks: RankPool
) -> None:
    other = write_tiny_model(tmp_path / "other", seed=5)
    model = load_reference(other)
    expected = [masked_log_probs(model, sequence) for sequence in make_sequences(5)]
    for found, recorded, trained in two_ranks.run(forward_only, model_folder, other):
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
        assert (recorded, trained) == (0, 0)
