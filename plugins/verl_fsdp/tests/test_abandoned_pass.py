"""fully_shard after an exception in a pass, also where torch has no call of its own that forgets it (before 2.13)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
from torch.distributed.fsdp import FSDPModule

from plugins.verl_fsdp.tests.gradient_view import look_instead_of_stepping
from verl_engine.testing.conformance.driver import Driver
from verl_engine.testing.conformance.reference import make_sequences, reference_gradient, relative_error

if TYPE_CHECKING:
    from pathlib import Path

    from verl_engine.testing.rank_pool import RankPool


class AbandonedError(RuntimeError):
    """Stands for whatever ends a pass."""


def abandon(*_: object) -> None:
    raise AbandonedError


def errors_after_abandoning(rank: int, folder: Path, setting: dict[str, Any]) -> dict[str, float]:
    """Return how wrong the gradient is after each module in which a forward or a backward ended."""
    section = {"backend": "fsdp2", "learning_rate": 1e-3, "device": "cpu", "max_grad_norm": 1e9, **setting}
    driver = Driver(section, folder, rank, 2)
    found = look_instead_of_stepping(cast("Any", driver.engine))
    trunk = cast("Any", driver.engine).model.model
    sequences = make_sequences(12)
    expected = reference_gradient(folder, sequences)
    errors = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "reset_iter_state", raising=False)
        for number, layer in enumerate(trunk.layers):
            for where in ("register_forward_pre_hook", "register_full_backward_hook"):
                hook = getattr(layer.mlp.up_proj, where)(abandon)
                with pytest.raises(AbandonedError):
                    driver.step(driver.micro_batches(make_sequences(12, seed=1), 2))
                hook.remove()
                driver.step(driver.micro_batches(sequences, 2))
                errors[f"layer {number}, {where}"] = relative_error(found.pop(), expected)
    return errors


@pytest.mark.dist
@pytest.mark.fault(11)
@pytest.mark.parametrize("setting", [{}, {"backward_prefetch": 1, "gradient_sync": "every_micro_batch"}])
def test_older_torch_forgets_an_abandoned_pass_too(
    ranks: RankPool, model_folder: Path, setting: dict[str, Any]
) -> None:
    for errors in ranks.run(errors_after_abandoning, model_folder, setting):
        assert {case: error for case, error in errors.items() if error > 2e-6} == {}
