"""When gradients are reduced, what is held and gathered meanwhile, and what is left after an exception."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from verl_engine.engine.fully_sharded import fsdp_modules
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import (
    make_sequences,
    reference_gradient,
    relative_error,
    weighted_loss,
)

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine
    from verl_fsdp.update.held_gradients import SyncChoice

pytestmark = pytest.mark.dist

MODES: Final[dict[str, dict[str, Any]]] = {
    "last": {"gradient_sync": "last_micro_batch"},
    "every": {"gradient_sync": "every_micro_batch"},
    "last, kept": {"gradient_sync": "last_micro_batch", "keep_unsharded": True},
    "every, kept": {"gradient_sync": "every_micro_batch", "keep_unsharded": True},
    "last, kept, never resharded": {"keep_unsharded": True, "reshard_after_forward": False},
    "last, kept, bf16": {"keep_unsharded": True, "param_dtype": "bfloat16"},
    "last, checkpointed": {"keep_unsharded": True, "activation_checkpointing": True},
}
FLOAT32: Final = [name for name in MODES if "bf16" not in name]


@pytest.fixture
def two_ranks(rank_pools: RankPools) -> RankPool:
    return rank_pools.get(2)


def build(rank: int, folder: Path, settings: dict[str, Any], world_size: int = 2) -> Driver:
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 1e9, **settings}
    return Driver(section, folder, rank, world_size)


def engine_of(driver: Driver) -> ShardedEngine:
    return cast("ShardedEngine", driver.engine)


def gathered(engine: ShardedEngine) -> list[str]:
    """Name the modules whose parameters are not sharded."""
    found = []
    for module in fsdp_modules(cast("Any", engine.model)):
        state: Any = module._get_fsdp_state()
        found += [type(module).__name__ for group in state._fsdp_param_groups if not group.is_sharded]
    return found


def read_gradient(driver: Driver, num_micro_batches: int) -> dict[str, torch.Tensor]:
    """Return the whole gradient of a batch, in place of a step."""
    engine, found = engine_of(driver), {}
    step = engine.optimizer.step

    def look() -> None:
        found.update({name: cast("Any", entry.grad).full_tensor() for name, entry in engine.parameters.items()})

    engine.optimizer.step = look  # type: ignore[method-assign, assignment]
    driver.step(driver.micro_batches(make_sequences(12), num_micro_batches))
    engine.optimizer.step = step  # type: ignore[method-assign]
    return found


class Collectives(TorchDispatchMode):
    """Counts collectives by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[str(func).split(".")[1].strip("_")] += 1
        return func(*args, **(kwargs or {}))


# What is held


def held_on_rank(rank: int, folder: Path, settings: dict[str, Any]) -> tuple[int, SyncChoice]:
    """Return the bytes of gradients on this rank after the first of two micro-batches, and what was foretold."""
    driver = build(rank, folder, settings)
    engine = engine_of(driver)
    found: list[int] = []

    def count_then_lose(output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        gradients = [cast("Any", slot.get()) for slot in engine.gradient_slots()]
        shards = [getattr(gradient, "_local_tensor", gradient) for gradient in gradients if gradient is not None]
        found.append(sum(shard.numel() * shard.element_size() for shard in shards))
        return weighted_loss(output, batch)

    driver.step(driver.micro_batches(make_sequences(8)), count_then_lose)
    return found[1], engine.sync


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_held_gradients_take_what_the_estimate_says(
    two_ranks: RankPool, model_folder: Path, budget: int | None, dtype: str
) -> None:
    settings = {"gradient_sync": "auto", "held_gradient_bytes": budget, "param_dtype": dtype}
    for held, choice in two_ranks.run(held_on_rank, model_folder, settings):
        assert choice.mode == ("last_micro_batch" if budget is None else "every_micro_batch")
        assert held == choice.held_bytes


# Keeping parameters gathered


def collectives_on_rank(rank: int, folder: Path, settings: dict[str, Any]) -> list[dict[str, int]]:
    """Count the collectives of a step of one, and of one of four micro-batches."""
    driver = build(rank, folder, settings)
    counts = []
    for num_micro_batches in (1, 4):
        micro_batches = driver.micro_batches(make_sequences(12), num_micro_batches)
        with Collectives() as counter:
            driver.step(micro_batches)
        counts.append(dict(counter.counts))
        assert gathered(engine_of(driver)) == []
    return counts


@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_kept_parameters_are_gathered_once_however_many_micro_batches(
    two_ranks: RankPool, model_folder: Path, reshard_after_forward: bool
) -> None:
    settings = {"keep_unsharded": True, "reshard_after_forward": reshard_after_forward}
    for one, four in two_ranks.run(collectives_on_rank, model_folder, settings):
        # Two blocks and the root.
        assert one["allgather_base"] == four["allgather_base"] == 3
        assert one["reduce_scatter_base"] == four["reduce_scatter_base"] == 3
    kept_none = two_ranks.run(collectives_on_rank, model_folder, {"reshard_after_forward": reshard_after_forward})
    assert all(four["allgather_base"] > one["allgather_base"] for one, four in kept_none)
    assert all(four["reduce_scatter_base"] == one["reduce_scatter_base"] == 3 for one, four in kept_none)


@pytest.mark.parametrize("mode", FLOAT32)
def test_the_gradient_is_right_in_every_mode(two_ranks: RankPool, model_folder: Path, mode: str) -> None:
    expected = reference_gradient(model_folder, make_sequences(12))
    for num_micro_batches in (1, 3):
        for gradient in two_ranks.run(gradient_on_rank, model_folder, MODES[mode], num_micro_batches):
            assert relative_error(gradient, expected) <= 2e-6


def gradient_on_rank(
    rank: int, folder: Path, settings: dict[str, Any], num_micro_batches: int, world_size: int = 2
) -> dict[str, torch.Tensor]:
    return read_gradient(build(rank, folder, settings, world_size), num_micro_batches)


def reshard_settings(engine: ShardedEngine) -> list[Any]:
    """Return to how many ranks each set of parameters reshards after the forward, and the other switches."""
    found: list[Any] = []
    for module in fsdp_modules(cast("Any", engine.model)):
        state: Any = module._get_fsdp_state()
        for group in state._fsdp_param_groups:
            info = group.post_forward_mesh_info
            size = None if info is None else info.shard_mesh_size
            found.append((size, group.reshard_after_backward, group.reduce_grads, state._state_ctx.is_last_backward))
    return found


def settings_after_steps(rank: int, folder: Path, keep: bool, reshard_after_forward: int) -> list[Any]:
    driver = build(rank, folder, {"keep_unsharded": keep, "reshard_after_forward": reshard_after_forward}, 4)
    driver.train(make_sequences(12))
    before = reshard_settings(engine_of(driver))
    with suppress(InterruptedStepError):
        driver.step(driver.micro_batches(make_sequences(12), 3), Interrupting(1))
    assert reshard_settings(engine_of(driver)) == before
    expected = reference_gradient(folder, make_sequences(12))
    fresh = build(rank, folder, {"keep_unsharded": keep, "reshard_after_forward": reshard_after_forward}, 4)
    assert relative_error(read_gradient(fresh, 3), expected) <= 2e-6
    return before


@pytest.mark.parametrize(
    "reshard_after_forward", [*(pytest.param(one, marks=pytest.mark.nightly) for one in (True, False)), 2]
)
def test_resharding_to_a_part_of_the_ranks_is_put_back(
    model_folder: Path, rank_pools: RankPools, reshard_after_forward: bool | int
) -> None:
    pool = rank_pools.get(4)
    plain = pool.run(settings_after_steps, model_folder, False, reshard_after_forward)
    assert pool.run(settings_after_steps, model_folder, True, reshard_after_forward) == plain


def evaluate_between_steps(rank: int, folder: Path, settings: dict[str, Any]) -> None:
    """Evaluation, export and snapshots between steps see the current weights, and leave nothing gathered."""
    driver, engine = build(rank, folder, settings), None
    engine = engine_of(driver)
    sequences = make_sequences(6)
    snapshots = driver.snapshots()
    start, first = driver.weights(), driver.infer(sequences)
    snapshots.save("start")
    driver.train(make_sequences(12))
    trained, second = driver.weights(), driver.infer(sequences)
    assert gathered(engine) == []
    assert not torch.equal(second[0], first[0])
    snapshots.restore("start")
    assert all(torch.equal(tensor, start[name]) for name, tensor in driver.weights().items())
    assert all(torch.equal(a, b) for a, b in zip(driver.infer(sequences), first, strict=True))
    engine.load_full_weights(trained.items())
    assert all(torch.equal(a, b) for a, b in zip(driver.infer(sequences), second, strict=True))
    driver.train(make_sequences(12))
    assert gathered(engine) == []


@pytest.mark.thinned(one_in=2)
@pytest.mark.parametrize(
    "settings",
    [
        {"reshard_after_forward": False},
        {"reshard_after_forward": False, "keep_unsharded": True},
        {"keep_unsharded": True},
        {"reshard_after_forward": 1},
        {"keep_unsharded": True, "param_dtype": "bfloat16"},
    ],
)
def test_evaluation_leaves_nothing_gathered_that_a_restore_would_not_reach(
    two_ranks: RankPool, model_folder: Path, settings: dict[str, Any]
) -> None:
    two_ranks.run(evaluate_between_steps, model_folder, settings)


# After an exception


class InterruptedStepError(RuntimeError):
    """Stands for whatever may go wrong."""


class Interrupting:
    """A loss that raises in one micro-batch."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self.left == 0:
            raise InterruptedStepError
        self.left -= 1
        return weighted_loss(output, batch)


def interrupt(driver: Driver, place: str, at: int) -> None:
    """Begin a step over three micro-batches, and raise in one of them."""
    engine, host = engine_of(driver), driver.worker._host
    first, second = [module for module in engine.model.modules() if type(module).__name__.endswith("DecoderLayer")]
    left = [at]

    def forward_hook(_module: Any, _args: Any, output: torch.Tensor) -> None:
        if left[0] == 0 and place == "forward":
            raise InterruptedStepError
        if left[0] == 0:
            output.register_hook(backward_hook)
        left[0] -= 1

    def backward_hook(_gradient: torch.Tensor) -> None:
        raise InterruptedStepError

    def between(is_last: bool, sync: Any = host.gradient_sync) -> Any:
        if left[0] == 0:
            raise InterruptedStepError
        left[0] -= 1
        return sync(engine, is_last)

    handles = []
    if place in ("forward", "backward"):
        # In the backward the second block is done, and maybe reduced, before the first one's turn comes.
        handles.append((first if place == "backward" else second).register_forward_hook(forward_hook))
    loss = Interrupting(at) if place == "loss" else weighted_loss
    with pytest.MonkeyPatch.context() as patch:
        if place == "between":
            patch.setattr(host, "gradient_sync", lambda _engine, is_last: between(is_last))
        with pytest.raises(InterruptedStepError):
            driver.step(driver.micro_batches(make_sequences(12, seed=1), 3), loss)
    for handle in handles:
        handle.remove()


def gradients_after_interruptions(rank: int, folder: Path, settings: dict[str, Any], world_size: int) -> None:
    driver = build(rank, folder, settings, world_size)
    engine = engine_of(driver)
    fresh = {count: read_gradient(build(rank, folder, settings, world_size), count) for count in (1, 3)}
    for place in ("forward", "loss", "backward", "between"):
        for at in range(3):
            interrupt(driver, place, at)
            assert gathered(engine) == [], (place, at)
            assert not any(slot.get() is not None for slot in engine.gradient_slots()), (place, at)
            for count, expected in fresh.items():
                found = read_gradient(driver, count)
                assert relative_error(found, expected) <= 1e-7, (place, at, count)


@pytest.mark.thinned(one_in=5)
@pytest.mark.parametrize("mode", MODES)
def test_after_an_abandoned_accumulation_the_next_gradient_is_a_fresh_engines(
    two_ranks: RankPool, model_folder: Path, mode: str
) -> None:
    two_ranks.run(gradients_after_interruptions, model_folder, MODES[mode], 2)


@pytest.mark.nightly
def test_abandoned_accumulations_of_a_model_with_several_copies(model_folder: Path, rank_pools: RankPools) -> None:
    pool = rank_pools.get(4)
    pool.run(gradients_after_interruptions, model_folder, {"shard_ranks": 2, "keep_unsharded": True}, 4)


# A gradient that is not finite


class Poisoned:
    """A loss times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = weighted_loss(output, batch)
        return loss * self.factor, metrics


def local(value: Any) -> torch.Tensor:
    found: torch.Tensor = getattr(value, "_local_tensor", value)
    return found


def skip_on_rank(rank: int, folder: Path, settings: dict[str, Any]) -> None:
    """A NaN on one rank is skipped by both, and leaves nothing."""
    driver = build(rank, folder, {"warmup_steps": 4, "max_grad_norm": 0.1, **settings})
    engine = engine_of(driver)
    driver.train(make_sequences(12))
    weights, rate = driver.weights(), engine.schedule.get_last_lr()
    moments = [local(value).clone() for state in engine.optimizer.state.values() for value in state.values()]
    step = driver.step(driver.micro_batches(make_sequences(12)), Poisoned(float("nan") if rank == 1 else 1.0)).optimizer
    assert not step.applied
    assert not torch.tensor(step.grad_norm).isfinite()
    assert engine.schedule.get_last_lr() == rate
    now = [local(value) for state in engine.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(before, after) for before, after in zip(moments, now, strict=True))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in driver.weights().items())
    assert not any(slot.get() is not None for slot in engine.gradient_slots())
    assert driver.train(make_sequences(12)).optimizer.learning_rate == pytest.approx(1e-3 * 2 / 4)


@pytest.mark.parametrize("settings", [{}, {"keep_unsharded": True}, {"gradient_sync": "every_micro_batch"}])
def test_a_skipped_step_leaves_moments_and_schedule_and_no_gradient(
    two_ranks: RankPool, model_folder: Path, settings: dict[str, Any]
) -> None:
    two_ranks.run(skip_on_rank, model_folder, settings)
