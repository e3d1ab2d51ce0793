"""Adapters and other heads under FSDP1, where trained and frozen parameters lie in one flat tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import torch
import torch.distributed as dist

from plugins.verl_fsdp.tests.gradient_view import look_instead_of_stepping, units_of
from verl_engine.contract.errors import UnsupportedError
from verl_engine.engine.base import WeightShard
from verl_engine.engine.weights.shards import assemble_weights
from verl_engine.testing.conformance.driver import Driver, same
from verl_engine.testing.conformance.reference import make_sequences, relative_error
from verl_engine.testing.tiny_models import write_tiny_model
from verl_fsdp.fsdp1.weights import clean_name

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine

pytestmark = pytest.mark.dist

LORA: Final = {"rank": 4, "alpha": 8.0}


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    """Two processes."""
    return rank_pools.get(2)


def build(rank: int, folder: Path, **settings: Any) -> Driver:
    section = {"backend": "fsdp", "learning_rate": 1e-2, "device": "cpu", **settings}
    return Driver(section, folder, rank, dist.get_world_size())


def gradient_after_two_steps(rank: int, folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Step twice, that B is not 0, and return the third gradient."""
    driver = build(rank, folder, max_grad_norm=1e9, **settings)
    for seed in range(2):
        driver.train(make_sequences(8, seed=seed))
    engine = cast("ShardedEngine", driver.engine)
    (found,) = [look_instead_of_stepping(engine)]
    driver.step(driver.micro_batches(make_sequences(12, seed=2), 3))
    return found[0]


@pytest.mark.parametrize("gradient_sync", ["last_micro_batch", "every_micro_batch"])
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_adapters_get_the_gradient_that_fsdp2_gives_them(
    model_folder: Path, two_ranks: RankPool, gradient_sync: str, reshard_after_forward: bool
) -> None:
    settings = {
        "lora": LORA,
        "gradient_sync": gradient_sync,
        "reshard_after_forward": reshard_after_forward,
        "activation_checkpointing": not reshard_after_forward,
    }
    own = two_ranks.run(gradient_after_two_steps, model_folder, settings)
    other = two_ranks.run(gradient_after_two_steps, model_folder, {**settings, "backend": "fsdp2"})
    for found, expected in zip(own, other, strict=True):
        assert found.keys() == expected.keys()
        assert all("lora" in name for name in found)
        # Two steps of AdamW lie before it: it makes much of a rounding where a gradient is nearly zero.
        assert relative_error(found, expected) <= 1e-3


def train_adapter(rank: int, folder: Path, out: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Train, then export in every way."""
    driver = build(rank, folder, lora=LORA, **settings)
    engine = cast("Any", driver.engine)
    before = driver.weights()
    for seed in range(2):
        driver.train(make_sequences(8, seed=seed))
    frozen = [parameter for name, parameter in engine.parameters.items() if "lora" not in name]
    engine.save_adapter(out / "adapter")
    engine.save_pretrained(out / "merged")
    sequences = make_sequences(4, seed=3)
    with engine.disable_adapter():
        without = driver.infer(sequences)
    with pytest.raises(UnsupportedError, match=r"engine\.lora"):
        engine.load_full_weights(before.items())
    return {
        "before": before,
        "after": driver.weights(),
        "pieces": [WeightShard(s.name, s.view_shape, s.offsets, s.tensor.clone()) for s in engine.weight_shards()],
        "specs": engine.weight_specs(),
        "kept": [name for name in driver.snapshots().save("a").tensors if "rotary" not in name],
        "num_states": sum(parameter in engine.optimizer.state for parameter in frozen),
        "with": driver.infer(sequences),
        "without": without,
    }


def test_an_adapter_goes_with_what_holds_its_layer_where_each_layer_is_wrapped(
    model_folder: Path, two_ranks: RankPool
) -> None:
    """Wrapped alone, an adapter shows peft float32 and computes in bfloat16: the first forward failed."""
    settings = {"lora": LORA, "wrap": ["Linear"], "param_dtype": "bfloat16", "gradient_sync": "auto"}
    two_ranks.run(gradient_after_two_steps, model_folder, settings)


def parameters_after_two_steps(rank: int, folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return trained weights, and the names of parameters that the wrapped model no longer has as such."""
    driver = build(rank, folder, lora=LORA, shard_ranks=1)
    for seed in range(2):
        driver.train(make_sequences(8, seed=seed))
    engine = cast("ShardedEngine", driver.engine)
    held = {clean_name(name): parameter for name, parameter in engine.model.named_parameters()}
    return driver.weights(), [name for name, own in engine.parameters.items() if held.get(name) is not own]


def test_a_frozen_module_that_nothing_shards_keeps_its_parameters(tmp_path: Path, two_ranks: RankPool) -> None:
    """With adapters nothing in the root is trained; FSDP1 forgot its parameters, and failed where they were tied."""
    folder = write_tiny_model(tmp_path / "tied", tied=True)
    (found, lost), _ = two_ranks.run(parameters_after_two_steps, folder)
    expected, _ = two_ranks.run(weights_of_fsdp2, folder)
    assert not lost
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


def weights_of_fsdp2(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    driver = build(rank, folder, backend="fsdp2", lora=LORA)
    for seed in range(2):
        driver.train(make_sequences(8, seed=seed))
    return driver.weights()


@pytest.mark.parametrize("settings", [{}, {"param_dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_adapters_are_exported_merged_and_kept_aside_alone(
    model_folder: Path, tmp_path: Path, two_ranks: RankPool, settings: dict[str, Any]
) -> None:
    import peft

    from verl_engine.testing.conformance.reference import load_reference, masked_log_probs

    ranks = two_ranks.run(train_adapter, model_folder, tmp_path, settings)
    base = load_reference(model_folder)
    adapted = peft.PeftModel.from_pretrained(load_reference(model_folder), tmp_path / "adapter")
    merged = dict(adapted.merge_and_unload().named_parameters())
    read_back = dict(load_reference(tmp_path / "merged").named_parameters())
    whole = dict(assemble_weights(ranks[0]["specs"], [piece for found in ranks for piece in found["pieces"]]))
    for found in ranks:
        assert same(found["before"], dict(base.named_parameters()))
        assert same(found["after"], whole)
        assert same(found["after"], read_back)
        assert sum(not torch.equal(found["before"][name], tensor) for name, tensor in found["after"].items()) == 2 * 7
        for name, tensor in merged.items():
            torch.testing.assert_close(found["after"][name], tensor, rtol=0, atol=1e-6)
        assert len(found["kept"]) == 2 * 7 * 2
        assert all(".lora_" in name for name in found["kept"])
        assert found["num_states"] == 0
        tolerance = 5e-6 if not settings else 5e-2
        for sequence, without in zip(make_sequences(4, seed=3), found["without"], strict=True):
            torch.testing.assert_close(without, masked_log_probs(base, sequence), rtol=0, atol=tolerance)
        assert not all(torch.equal(*pair) for pair in zip(found["with"], found["without"], strict=True))


def value_step(rank: int, folder: Path, backend: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Return a critic's weights after a step, and its values."""
    driver = build(rank, folder, backend=backend, head="value")
    values = [torch.from_numpy(part) for part in driver.worker.infer_batch([make_sequences(4)])[0]]
    return driver.weights(), values


def test_a_critic_says_what_fsdp2s_says(model_folder: Path, two_ranks: RankPool) -> None:
    own, other = (two_ranks.run(value_step, model_folder, backend) for backend in ("fsdp", "fsdp2"))
    for (weights, values), (expected_weights, expected) in zip(own, other, strict=True):
        assert same(weights, expected_weights)
        torch.testing.assert_close(values, expected, rtol=0, atol=5e-6)


def held_bytes(rank: int, folder: Path) -> tuple[int, int]:
    engine = cast("ShardedEngine", build(rank, folder, lora=LORA).engine)
    blocks = [unit for unit in units_of(engine) if any("layers" in member.name for member in unit.members)]
    return engine.sync.last_bytes, sum(unit.numel for unit in blocks) * 4


def test_the_budget_counts_frozen_parameters_beside_trained_ones(model_folder: Path, two_ranks: RankPool) -> None:
    """FSDP1 holds a gradient for the whole flat tensor."""
    for counted, expected in two_ranks.run(held_bytes, model_folder):
        assert counted == expected
