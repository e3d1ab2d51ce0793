"""FSDP1's gradients: every way to divide, wrap and compute, against one plain process in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import torch
import torch.distributed as dist
import transformers

from plugins.verl_fsdp.tests.gradient_view import look_instead_of_stepping, units_of, whole_gradients
from verl_engine.batch.packed import PackedBatch
from verl_engine.engine.micro_batch_pass import MicroBatchPass
from verl_engine.testing.conformance.collectives import ReductionCounter
from verl_engine.testing.conformance.driver import Driver, differences
from verl_engine.testing.conformance.reference import (
    accumulate,
    load_reference,
    make_sequences,
    reference_gradient,
    relative_error,
    weighted_loss,
)
from verl_engine.testing.tiny_models import tiny_config, write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.sequence import Sequence
    from verl_engine.engine.base import TokenOutput
    from verl_engine.engine.train_step import StepReport
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine

pytestmark = pytest.mark.dist

NUM_SEQUENCES: Final = 12
LOSS_SCALE: Final = 0.01
"""As that of a batch of a hundred tokens: times the loss scale of float16 it must stay in range."""
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "kept gathered": {"reshard_after_forward": False},
    "a copy on each rank": {"shard_ranks": 1},
    "a copy on each rank, reduced each time": {"shard_ranks": 1, "gradient_sync": "every_micro_batch"},
    "checkpointed": {"activation_checkpointing": True},
    "checkpointed, kept gathered": {"activation_checkpointing": True, "reshard_after_forward": False},
    "prefetched in the forward": {"forward_prefetch": True},
    "prefetched after": {"backward_prefetch": "after"},
    "not prefetched": {"backward_prefetch": "off"},
    "no blocks but the attention": {"wrap": ("Qwen3Attention",)},
    "sequences split": {"sequence_parallel_size": 2},
}


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    """Two processes."""
    return rank_pools.get(2)


def build(rank: int, folder: Path, settings: dict[str, Any], num_ranks: int = 2) -> tuple[Driver, ShardedEngine]:
    """Build an engine that clips nothing."""
    section = {"backend": "fsdp", "learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 1e9, **settings}
    driver = Driver(section, folder, rank, num_ranks)
    return driver, cast("ShardedEngine", driver.engine)


def plain_gradient(folder: Path, sequences: list[Sequence]) -> dict[str, torch.Tensor]:
    """Compute it in one process, in float64 where the model can: experts cannot."""
    if "experts" not in folder.name:
        return reference_gradient(folder, sequences)
    model = load_reference(folder)
    accumulate(model, sequences)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_error(rank: int, folder: Path, settings: dict[str, Any], num_ranks: int = 2) -> tuple[float, float]:
    """Return how wrong the gradient of the second of two steps is, and its norm; an inference lies between them."""
    driver, engine = build(rank, folder, settings, num_ranks)
    sequences = make_sequences(NUM_SEQUENCES)
    expected = plain_gradient(folder, sequences)
    found = look_instead_of_stepping(engine)
    driver.step(driver.micro_batches(make_sequences(NUM_SEQUENCES, seed=1), 2))
    driver.infer(make_sequences(3))
    report = driver.step(driver.micro_batches(sequences, 3))
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum().sqrt()
    return relative_error(found[-1], expected), abs(report.optimizer.grad_norm / float(norm) - 1)


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_gradient_and_norm_are_those_of_one_process(model_folder: Path, two_ranks: RankPool, setting: str) -> None:
    for error, norm_error in two_ranks.run(gradient_error, model_folder, SETTINGS[setting]):
        assert (error <= 2e-6, norm_error <= 2e-6) == (True, True), (error, norm_error)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_blocks_give_the_gradient_of_one_process(model_folder: Path, rank_pools: RankPools) -> None:
    pool = rank_pools.get(2)
    settings = {"compile": True, "compile_backend": "eager", "activation_checkpointing": True}
    for error, norm_error in pool.run(gradient_error, model_folder, settings, timeout_s=280.0):
        assert (error <= 2e-6, norm_error <= 2e-6) == (True, True), (error, norm_error)
    pool.close()  # in there, no other compiler can be used any more


@pytest.mark.thinned(1)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("gradient_sync", ["last_micro_batch", "every_micro_batch"])
def test_gradient_and_norm_are_right_in_several_copies(
    model_folder: Path, gradient_sync: str, reshard_after_forward: bool, rank_pools: RankPools
) -> None:
    """The norm counts each entry once: over the ranks of a copy, not over the copies."""
    pool = rank_pools.get(4)
    settings = {
        "shard_ranks": 2,
        "gradient_sync": gradient_sync,
        "reshard_after_forward": reshard_after_forward,
    }
    for error, norm_error in pool.run(gradient_error, model_folder, settings, 4):
        assert (error <= 2e-6, norm_error <= 2e-6) == (True, True), (error, norm_error)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_gradient_of_tied_embeddings_and_of_experts(tmp_path: Path, two_ranks: RankPool, kind: str) -> None:
    folder = tmp_path / kind
    if kind == "tied":
        write_tiny_model(folder, tied=True)
    else:
        config = transformers.Qwen3MoeConfig(
            **tiny_config(), num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for error, _ in two_ranks.run(gradient_error, folder, {}):
        assert error <= 5e-6


def accumulated_and_summed(rank: int, folder: Path, settings: dict[str, Any], num_ranks: int) -> float:
    """Return how far the gradient accumulated over four micro-batches is from the float32 sum of their gradients."""
    driver, engine = build(rank, folder, settings, num_ranks)
    batches = [
        PackedBatch.from_sequences(sequences, engine.device.torch_device)
        for sequences in driver.micro_batches(make_sequences(16), 4)
    ]
    engine.set_training(True)
    engine.forward_backward(MicroBatchPass(batches, weighted_loss, engine.gradient_sync, loss_scale=LOSS_SCALE))
    accumulated = whole_gradients(engine)
    summed = {name: torch.zeros_like(gradient) for name, gradient in accumulated.items()}
    for batch in batches:
        engine.zero_grad()
        engine.forward_backward(MicroBatchPass([batch], weighted_loss, engine.gradient_sync, loss_scale=LOSS_SCALE))
        for name, gradient in whole_gradients(engine).items():
            summed[name] += gradient
    return relative_error(accumulated, summed)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("shard_ranks", [None, 1])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16", "float16"])
def test_accumulation_is_in_float32_whatever_the_model_computes_in(
    model_folder: Path, param_dtype: str, shard_ranks: int | None, num_ranks: int, rank_pools: RankPools
) -> None:
    """In bfloat16 it would be off by 1e-2: FSDP1 does so where gradients are not reduced each time."""
    pool = rank_pools.get(num_ranks)
    settings = {"param_dtype": param_dtype, "shard_ranks": shard_ranks}
    for error in pool.run(accumulated_and_summed, model_folder, settings, num_ranks):
        assert error <= 2e-6


def reductions(rank: int, folder: Path, settings: dict[str, Any]) -> list[int]:
    """Count the reductions of a step of one micro-batch, and of one of four."""
    driver, engine = build(rank, folder, settings)
    counts = []
    for num_micro_batches in (1, 4):
        with ReductionCounter(engine.data_parallel.group) as counter:
            driver.step(driver.micro_batches(make_sequences(NUM_SEQUENCES), num_micro_batches))
        counts.append(counter.count)
    return counts


def test_auto_holds_gradients_back_only_where_that_is_float32_and_fits(model_folder: Path, two_ranks: RankPool) -> None:
    for (one, many), (one_of_less, many_of_less), (one_of_bf16, many_of_bf16) in zip(
        two_ranks.run(reductions, model_folder, {"gradient_sync": "auto"}),
        two_ranks.run(reductions, model_folder, {"gradient_sync": "auto", "held_gradient_bytes": 100}),
        two_ranks.run(reductions, model_folder, {"param_dtype": "bfloat16"}),
        strict=True,
    ):
        assert one == many
        # Two blocks and the rest are reduced three times more.
        assert many_of_less - one_of_less == many_of_bf16 - one_of_bf16 == 3 * 3


class Poisoned:
    """A loss that is not finite on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = weighted_loss(output, batch)
        return loss * (float("inf") if dist.get_rank() == self._rank else 1.0), metrics


def step_poisoned(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[StepReport, str, bool]:
    """Train once, then once with a gradient that is not finite; return that report, and what changed."""
    driver, engine = build(rank, folder, settings)
    driver.train(make_sequences(8))
    before = driver.weights()
    report = driver.step(driver.micro_batches(make_sequences(8, seed=1)), Poisoned(1))
    has_gradient = any(unit.handle.flat_param.grad is not None for unit in units_of(engine))
    return report, differences(driver.weights(), before), has_gradient


@pytest.mark.parametrize("param_dtype", ["float32", "float16"])
def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(
    model_folder: Path, two_ranks: RankPool, param_dtype: str
) -> None:
    """torch's own clipping writes NaN into all gradients."""
    for report, difference, has_gradient in two_ranks.run(step_poisoned, model_folder, {"param_dtype": param_dtype}):
        assert not report.optimizer.applied
        assert report.optimizer.overflow == (param_dtype == "float16")
        assert (difference, has_gradient) == ("none", False)


def local_norms(rank: int, folder: Path) -> tuple[float, int]:
    """Return the norm of a gradient where this rank has not a single entry of what is trained, and how many it has."""
    _driver, engine = build(rank, folder, {})
    for name, parameter in engine.parameters.items():
        parameter.requires_grad_(name == "model.embed_tokens.weight")  # the beginning of the root: all on rank 0
    batch = PackedBatch.from_sequences(make_sequences(4), engine.device.torch_device)
    engine.forward_backward(MicroBatchPass([batch], weighted_loss, engine.gradient_sync))
    entries = sum(entry.grad.numel() for entry in engine.parameters.values() if entry.grad is not None)
    return float(engine.clip_gradients()), entries


def test_a_rank_without_a_piece_of_what_is_trained_has_part_in_the_norm(
    model_folder: Path, two_ranks: RankPool
) -> None:
    (norm, entries), (norm_of_other, entries_of_other) = two_ranks.run(local_norms, model_folder)
    assert norm == norm_of_other > 0
    assert (entries, entries_of_other) == (32 * 32, 0)
