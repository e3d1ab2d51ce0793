from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from verl_engine.testing.conformance import optimizer, reference
from verl_engine.testing.tiny_models import write_tiny_model

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_rounding_that_gradients_may_have_is_rounding_that_weights_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adam divides by a gradient's size: an engine whose attention rounds otherwise was called wrong."""
    plain, noise = reference.accumulate, torch.Generator()

    def rounded(model: Any, *arguments: Any) -> tuple[float, float]:
        result = plain(model, *arguments)
        for parameter in model.parameters():
            gradient = parameter.grad
            gradient += 1e-5 * gradient.abs().max() * torch.empty_like(gradient).uniform_(-1, 1, generator=noise)
        return result

    def trained() -> dict[str, Any]:
        folder = write_tiny_model(tmp_path / "model")
        run = reference.ReferenceRun(folder, 1e-2, 0.1, optimizer.MAX_NORM, eps=optimizer.EPS)
        return run.train([reference.make_sequences(8, seed=seed) for seed in range(4)], [1.0] * 4)

    right = trained()
    monkeypatch.setattr(reference, "accumulate", rounded)
    assert reference.furthest(trained(), right)[1] <= optimizer.OF_A_STEP
