"""The gradient that AdamW gets, read before it steps: that of the global batch, for splits that hypothesis draws.

The kit proves the same to 1e-5 on any backend, by what a step changes. Here the gradient itself is looked at, to 2e-6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import (
    make_sequences,
    reference_gradient,
    relative_error,
    weighted_loss,
)
from verl_engine.testing.ranks import run_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from verl_engine.testing.conformance.driver import Split
    from verl_fsdp.engine import Fsdp2Engine

NUM_SEQUENCES: Final = 12
TOLERANCE: Final = 2e-6


@st.composite
def splits(draw: st.DrawFn, num_ranks: int) -> Split:
    """Draw a division of all sequences over ranks and up to five micro-batches, empty ones too."""
    count = draw(st.integers(1, 5))
    split: Split = [[[] for _ in range(count)] for _ in range(num_ranks)]
    for index in range(NUM_SEQUENCES):
        split[draw(st.integers(0, num_ranks - 1))][draw(st.integers(0, count - 1))].append(index)
    return split


def gradients_on_rank(
    rank: int, folder: Path, drawn: list[Split], settings_: dict[str, Any]
) -> list[dict[str, torch.Tensor]]:
    """Return the whole gradient for each split, from one engine that lives through all of them."""
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", **settings_}
    driver = Driver(section, folder, rank, len(drawn[0]))
    engine = cast("Fsdp2Engine", driver.engine)
    sequences = make_sequences(NUM_SEQUENCES)
    found: list[dict[str, torch.Tensor]] = []

    def look_instead_of_stepping() -> None:
        found.append({name: cast("Any", parameter.grad).full_tensor() for name, parameter in engine.parameters.items()})

    engine.optimizer.step = look_instead_of_stepping  # type: ignore[method-assign, assignment]
    engine.config = engine.config.model_copy(update={"max_grad_norm": 1e9})  # nothing is clipped
    for split in drawn:
        driver.step(driver.take(sequences, split), weighted_loss)
    return found


@pytest.mark.dist
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("gradient_sync", ["last_micro_batch", "every_micro_batch"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradient_is_that_of_the_global_batch(
    model_folder: Path, num_ranks: int, gradient_sync: str, packing: bool
) -> None:
    expected = reference_gradient(model_folder, make_sequences(NUM_SEQUENCES))

    # An example is several splits, since starting ranks takes longer than all of them. The first one is always the
    # simplest, everything in one micro-batch.
    @settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(splits(num_ranks), min_size=8, max_size=8))
    def check(drawn: list[Split]) -> None:
        by_rank = run_ranks(
            gradients_on_rank,
            model_folder,
            drawn,
            {"packing": packing, "gradient_sync": gradient_sync},
            world_size=num_ranks,
        )
        for gradients in by_rank:
            assert len(gradients) == len(drawn)
            assert max(relative_error(gradient, expected) for gradient in gradients) <= TOLERANCE

    check()
