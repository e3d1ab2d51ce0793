"""The accumulation contract: the gradient is that of the global batch, for any split, ranks, packing and sync mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins.verl_fsdp.tests.driving import Driver, Split, take
from plugins.verl_fsdp.tests.reference import make_sequences, reference_gradient, relative_error
from verl_engine.testing.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

NUM_SEQUENCES = 12
TOLERANCE = 2e-6


@st.composite
def splits(draw: st.DrawFn, num_ranks: int) -> Split:
    """Draw a division of all sequences over ranks and up to five micro-batches, empty ones too."""
    count = draw(st.integers(1, 5))
    split: Split = [[[] for _ in range(count)] for _ in range(num_ranks)]
    for index in range(NUM_SEQUENCES):
        split[draw(st.integers(0, num_ranks - 1))][draw(st.integers(0, count - 1))].append(index)
    return split


def gradients_on_rank(
    rank: int, folder: Path, drawn: list[Split], settings_: dict[str, object]
) -> list[dict[str, torch.Tensor]]:
    """Return the whole gradient for each split, from one engine that lives through all of them."""
    driver = Driver.create(folder, **settings_)
    sequences = make_sequences(NUM_SEQUENCES)
    return [driver.gradient(take(sequences, split[rank])) for split in drawn]


@pytest.mark.dist
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("gradient_sync", ["last_micro_batch", "every_micro_batch"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradient_is_that_of_the_global_batch(
    model_folder: Path, num_ranks: int, gradient_sync: str, packing: bool
) -> None:
    expected = reference_gradient(model_folder, make_sequences(NUM_SEQUENCES))

    @settings(max_examples=1, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(splits(num_ranks), min_size=12, max_size=12))
    def check(drawn: list[Split]) -> None:
        by_rank = run_ranks(
            gradients_on_rank,
            model_folder,
            drawn,
            {"packing": packing, "gradient_sync": gradient_sync},
            world_size=num_ranks,
        )
        for gradients in by_rank:
            assert max(relative_error(gradient, expected) for gradient in gradients) <= TOLERANCE

    check()


def count_reductions(rank: int, folder: Path, gradient_sync: str) -> int:
    """Count the reduce-scatters of a step with four micro-batches."""
    from unittest import mock

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    driver = Driver.create(folder, gradient_sync=gradient_sync)
    sequences = make_sequences(NUM_SEQUENCES)
    original = vars(_fsdp_param_group)["foreach_reduce"]
    with mock.patch.object(_fsdp_param_group, "foreach_reduce", side_effect=original) as reductions:
        driver.step([sequences[rank + 2 * index : rank + 2 * index + 1] for index in range(4)])
    return reductions.call_count


@pytest.mark.dist
def test_gradients_are_reduced_when_the_config_says(model_folder: Path) -> None:
    # Three groups of parameters (two layers and the rest), four micro-batches.
    assert run_ranks(count_reductions, model_folder, "last_micro_batch") == [3, 3]
    assert run_ranks(count_reductions, model_folder, "every_micro_batch") == [12, 12]


def gradient_after_failure(rank: int, folder: Path, fail_at: int) -> list[dict[str, torch.Tensor]]:
    """Fail in one micro-batch of an accumulation, then compute another gradient."""
    driver = Driver.create(folder)
    sequences = make_sequences(NUM_SEQUENCES)
    calls = 0

    def failing_loss(output: object, batch: object) -> object:
        from plugins.verl_fsdp.tests.reference import weighted_loss

        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise RuntimeError("as a user's loss may")
        return weighted_loss(output, batch)  # type: ignore[arg-type]

    own = list(range(rank, NUM_SEQUENCES, 2))
    halves = take(sequences, [own[:3], own[3:]])
    with pytest.raises(RuntimeError, match="as a user's loss may"):
        driver.step(halves, failing_loss)  # type: ignore[arg-type]
    return [driver.gradient(halves)]


@pytest.mark.dist
@pytest.mark.parametrize("fail_at", [1, 2])
def test_an_abandoned_accumulation_leaves_nothing_behind(model_folder: Path, fail_at: int) -> None:
    expected = reference_gradient(model_folder, make_sequences(NUM_SEQUENCES))
    for gradients in run_ranks(gradient_after_failure, model_folder, fail_at):
        assert relative_error(gradients[0], expected) <= TOLERANCE


def bf16_error(rank: int, folder: Path, num_micro_batches: int) -> tuple[float, set[str]]:
    """Return the error of a bf16 gradient against float32, and the dtypes of what the optimizer gets."""
    sequences = make_sequences(NUM_SEQUENCES)
    split = [list(range(NUM_SEQUENCES))[index::num_micro_batches][rank::2] for index in range(num_micro_batches)]
    driver = Driver.create(folder, param_dtype="bfloat16")
    gradient = driver.gradient(take(sequences, split))
    dtypes = {str(tensor.dtype) for tensor in (*gradient.values(), *driver.engine.parameters.values())}
    return relative_error(gradient, reference_gradient(folder, sequences)), dtypes


@pytest.mark.dist
def test_bf16_keeps_float32_gradients_and_master_weights(model_folder: Path) -> None:
    for error, dtypes in run_ranks(bf16_error, model_folder, 3):
        assert dtypes == {"torch.float32"}
        assert 1e-5 < error < 0.1  # coarser than float32, so bf16 was really computed, but the same gradient
