"""What FSDP1 is told, and what it makes of it: strategies, dtypes, blocks, buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from plugins.verl_fsdp.tests.gradient_view import units_of
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import load_reference, make_sequences
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


def build(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[Driver, ShardedEngine]:
    section = {"backend": "fsdp", "learning_rate": 1e-3, "device": "cpu", **settings}
    driver = Driver(section, folder, rank, dist.get_world_size())
    return driver, cast("ShardedEngine", driver.engine)


def strategies(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[set[str], list[str], float]:
    """Return the strategy of all wrapped modules, their classes, and the fraction of the weights that this rank has."""
    _, engine = build(rank, folder, settings)
    modules = FullyShardedDataParallel.fsdp_modules(engine.model)
    own = sum(unit.local.numel() for unit in units_of(engine))
    whole = sum(unit.numel for unit in units_of(engine))
    return (
        {module.sharding_strategy.name for module in modules},
        [type(module.module).__name__ for module in modules],
        own / whole,
    )


@pytest.mark.parametrize(
    ("num_ranks", "settings", "expected", "share"),
    [
        (1, {}, "NO_SHARD", 1),
        (2, {}, "FULL_SHARD", 1 / 2),
        (2, {"reshard_after_forward": False}, "SHARD_GRAD_OP", 1 / 2),
        (2, {"shard_ranks": 1}, "NO_SHARD", 1),
        (4, {"shard_ranks": 2}, "HYBRID_SHARD", 1 / 2),
        (4, {"shard_ranks": 2, "reshard_after_forward": False}, "_HYBRID_SHARD_ZERO2", 1 / 2),
    ],
)
def test_what_is_configured_is_what_is_done(
    model_folder: Path, num_ranks: int, settings: dict[str, Any], expected: str, share: float, rank_pools: RankPools
) -> None:
    pool = rank_pools.get(num_ranks)
    for found, classes, own in pool.run(strategies, model_folder, settings):
        assert found == {expected}
        assert sorted(classes) == ["Qwen3DecoderLayer", "Qwen3DecoderLayer", "Qwen3ForCausalLM"]
        assert own == pytest.approx(share, rel=0.01)


def precisions(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Return the dtypes in which a layer computes, and in which its weights, gradients and buffers are kept."""
    driver, engine = build(rank, folder, settings)
    layer = cast("Any", engine.module).model.layers[0].module
    found = {}

    def look(module: Any, inputs: Any, output: Any) -> None:
        found["weight inside"] = str(module.weight.dtype)
        found["input"] = str(inputs[0].dtype)
        found["output"] = str(output.dtype)

    layer.mlp.up_proj.register_forward_hook(look)
    for _ in range(4):  # float16 begins with a scale that may be too large
        driver.train(make_sequences(4))
    found["weight"] = str(engine.parameters["model.layers.0.mlp.up_proj.weight"].dtype)
    state = next(iter(engine.optimizer.state.values()))
    found["moment"] = str(state["exp_avg"].dtype)
    found["buffers"] = str({buffer.dtype for buffer in engine.module.buffers()})
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_configured_dtype_is_computed_in_and_the_rest_stays_float32(
    model_folder: Path, two_ranks: RankPool, dtype: str
) -> None:
    for found in two_ranks.run(precisions, model_folder, {"param_dtype": dtype}):
        inside = f"torch.{dtype}"
        assert found == {
            "weight inside": inside,
            "input": inside,
            "output": inside,
            "weight": "torch.float32",
            "moment": "torch.float32",
            "buffers": "{torch.float32}",
        }


def buffers_and_ties(rank: int, folder: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Return all buffers, and whether embedding and output layer are one parameter; after a training step."""
    driver, engine = build(rank, folder, {})
    driver.train(make_sequences(4))
    model = cast("Any", engine.module)
    return dict(model.named_buffers()), model.lm_head.weight is model.model.embed_tokens.weight


def test_ranks_that_read_no_folder_have_its_buffers_and_ties(tmp_path: Path, two_ranks: RankPool) -> None:
    """Buffers that no folder holds, such as rotary frequencies, would stay whatever was in memory."""
    folder = write_tiny_model(tmp_path / "model", tied=True)
    expected = dict(load_reference(folder).named_buffers())
    assert expected
    for buffers, is_tied in two_ranks.run(buffers_and_ties, folder):
        assert is_tied
        assert buffers.keys() == expected.keys()
        assert all(torch.equal(buffers[name], tensor) for name, tensor in expected.items())


def decayed_by_a_step(rank: int, folder: Path) -> dict[str, float]:
    """Make a step whose gradient is negligible beside the weight decay; return what each weight was multiplied by."""
    driver, engine = build(rank, folder, {"weight_decay": 100.0, "eps": 1e9})
    before = driver.weights()
    driver.train(make_sequences(4))
    after = driver.weights()
    assert engine.parameters["model.norm.weight"].ndim == engine.parameters["lm_head.weight"].ndim == 1
    return {name: float((after[name] / before[name]).nanmedian()) for name in before}


def test_weight_decay_spares_vectors_though_all_pieces_are_vectors(model_folder: Path, two_ranks: RankPool) -> None:
    for factors in two_ranks.run(decayed_by_a_step, model_folder):
        for name, factor in factors.items():
            assert factor == pytest.approx(1.0 if "norm" in name else 0.9, abs=1e-5), name
