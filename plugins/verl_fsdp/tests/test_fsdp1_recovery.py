"""FSDP1 after a pass that was abandoned: in a forward, in a backward, or between micro-batches.

FSDP1 itself keeps unreduced gradients, its state and its hooks, and fails or counts gradients twice at the next step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import pytest

from plugins.verl_fsdp.tests.gradient_view import look_instead_of_stepping, units_of
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import (
    make_sequences,
    reference_gradient,
    relative_error,
    weighted_loss,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from verl_engine.batch.packed import PackedBatch
    from verl_engine.engine.base import TokenOutput
    from verl_engine.testing.rank_pool import RankPool
    from verl_engine.testing.rank_pools import RankPools
    from verl_fsdp.engine import ShardedEngine

NUM_SEQUENCES: Final = 12
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "held": {"gradient_sync": "last_micro_batch"},
    "reduced": {"gradient_sync": "every_micro_batch"},
    "kept gathered": {"gradient_sync": "last_micro_batch", "reshard_after_forward": False},
    "prefetched": {"gradient_sync": "last_micro_batch", "forward_prefetch": True},
    "checkpointed": {"gradient_sync": "every_micro_batch", "activation_checkpointing": True},
}


class AbandonedError(RuntimeError):
    """Stands for whatever ends a pass: out of memory, an interrupt, a bug of the user's."""


class Abandoning:
    """A loss that raises at one micro-batch: at once, or while its backward is under way."""

    def __init__(self, where: str, at: int) -> None:
        self.where, self.left = where, at

    def __call__(self, output: TokenOutput, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.left -= 1
        if self.left == -1 and self.where == "loss":
            raise AbandonedError
        return weighted_loss(output, batch)


def interrupt(engine: ShardedEngine, where: str, at: int) -> list[Any]:
    """Let the second block raise in the forward or the backward of one micro-batch; return the hooks' handles."""
    trunk = cast("Any", engine.module).model
    block = trunk.layers[1].module
    left = [at]

    def next_micro_batch(*_: object) -> None:
        left[0] -= 1

    def in_forward(*_: object) -> None:
        if left[0] == -1 and where == "forward":
            raise AbandonedError

    def in_backward(*_: object) -> None:
        if left[0] == -1 and where == "backward":
            raise AbandonedError

    return [
        trunk.embed_tokens.register_forward_pre_hook(next_micro_batch),
        block.mlp.register_forward_pre_hook(in_forward),
        block.self_attn.q_proj.register_full_backward_hook(in_backward),
    ]


def errors_after_abandoning(rank: int, folder: Path, num_ranks: int, setting: dict[str, Any]) -> dict[str, float]:
    """Return, for each place and micro-batch that a step was abandoned at, how wrong the next gradients are."""
    section = {"backend": "fsdp", "learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 1e9, **setting}
    driver = Driver(section, folder, rank, num_ranks)
    engine = cast("ShardedEngine", driver.engine)
    sequences = make_sequences(NUM_SEQUENCES)
    expected = reference_gradient(folder, sequences)
    found = look_instead_of_stepping(engine)
    errors = {}
    for where in ("loss", "forward", "backward"):
        for at in (0, 1, 2):
            hooks = interrupt(engine, where, at)
            with pytest.raises(AbandonedError):
                driver.step(driver.micro_batches(make_sequences(NUM_SEQUENCES, seed=1), 3), Abandoning(where, at))
            for hook in hooks:
                hook.remove()
            nothing_left(engine)
            for num_micro_batches in (1, 3):  # what was left switched off shows in a single one
                driver.step(driver.micro_batches(sequences, num_micro_batches))
                errors[f"{where} {at}, then {num_micro_batches}"] = relative_error(found.pop(), expected)
    return errors


def nothing_left(engine: ShardedEngine) -> None:
    """Check that no gradient and nothing gathered is alive after an abandoned step."""
    for unit in units_of(engine):
        flat = unit.handle.flat_param
        assert flat.grad is None
        assert not hasattr(flat, "_saved_grad_shard")
        assert not hasattr(flat, "_post_backward_hook_state")
        assert unit.num_ranks == 1 or unit.handle.needs_unshard()
    assert all(parameter.grad is None for parameter in engine.parameters.values())


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.nightly), 2])
def ranks(request: pytest.FixtureRequest, rank_pools: RankPools) -> tuple[int, RankPool]:
    """A number of ranks, and their processes."""
    return request.param, rank_pools.get(request.param)


@pytest.mark.dist
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_an_abandoned_accumulation_leaves_nothing_behind(
    model_folder: Path, ranks: tuple[int, RankPool], setting: str
) -> None:
    num_ranks, pool = ranks
    for errors in pool.run(errors_after_abandoning, model_folder, num_ranks, SETTINGS[setting]):
        assert {case: error for case, error in errors.items() if error > 2e-6} == {}


@pytest.mark.nightly
@pytest.mark.dist
def test_an_abandoned_accumulation_leaves_nothing_behind_in_several_copies(
    model_folder: Path, rank_pools: RankPools
) -> None:
    pool = rank_pools.get(4)
    for errors in pool.run(errors_after_abandoning, model_folder, 4, {"shard_ranks": 2}):
        assert {case: error for case, error in errors.items() if error > 2e-6} == {}


def run_after_failed_inference(rank: int, folder: Path, setting: dict[str, Any]) -> tuple[float, float]:
    """Return how far log-probs and a gradient are off after an inference that failed in the middle."""
    section = {"backend": "fsdp", "learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 1e9, **setting}
    driver = Driver(section, folder, rank, 2)
    engine = cast("ShardedEngine", driver.engine)
    sequences = make_sequences(NUM_SEQUENCES)
    before = driver.infer(sequences)
    hooks = interrupt(engine, "forward", 0)
    with pytest.raises(AbandonedError):
        driver.infer(sequences)
    for hook in hooks:
        hook.remove()
    driver.snapshots().save("a")  # looks at the weights, and by that alone made things worse
    after = driver.infer(sequences)
    found = look_instead_of_stepping(engine)
    driver.step(driver.micro_batches(sequences, 3))
    error = relative_error(found.pop(), reference_gradient(folder, sequences))
    return max(float((new - old).abs().max()) for new, old in zip(after, before, strict=True)), error


@pytest.mark.dist
@pytest.mark.parametrize("setting", list(SETTINGS))
def test_after_an_inference_that_failed_the_model_runs_again(
    model_folder: Path, setting: str, rank_pools: RankPools
) -> None:
    """Nobody calls zero_grad after one; FSDP1 took the weights for gathered, and every later forward failed."""
    pool = rank_pools.get(2)
    for change, error in pool.run(run_after_failed_inference, model_folder, SETTINGS[setting]):
        assert change == 0
        assert error <= 2e-6
