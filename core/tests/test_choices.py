"""An argument with a text that is none of its choices is an error that names them, not the default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.engine_config import EngineConfig
from verl_engine.contract.errors import ConfigError
from verl_engine.engine.linear_log_probs import linear_log_probs
from verl_engine.engine.output_from_logits import numbers_from_logits
from verl_engine.engine.snapshots.memory import SnapshotMemory
from verl_engine.engine.snapshots.weight_snapshot import WeightSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

WRONG: Any = "values"
ROWS, TARGETS = torch.ones(1, 2), torch.tensor([0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear_log_probs(ROWS, ROWS, TARGETS, entropy=WRONG), "^entropy='values' .* off, value, gradient$"),
        (lambda: numbers_from_logits(ROWS, TARGETS, 1.0, WRONG), "^entropy='values' must be one of off, value"),
        (lambda: SnapshotMemory(WRONG), "the kind of snapshots='values' must be one of private, shared"),
        (lambda: WeightSnapshot("a", kind=WRONG), "the kind of a snapshot='values' must be one of private, shared"),
        (lambda: WeightSnapshot("a", kind=type(WRONG)()), "the kind of a snapshot='' must be one of private, shared"),
    ],
)
def test_an_unknown_choice_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_feature_that_there_is_not_is_refused() -> None:
    spec = BackendSpec(name="toy", config_class=EngineConfig, devices=("cpu",))
    spec.require("own_positions")
    with pytest.raises(ValueError, match="'own_position' is not a feature; they are"):
        spec.require("own_position")
