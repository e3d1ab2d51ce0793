"""Read the gradient that an engine really applies, through nothing but its optimizer step.

AdamW with betas 0 and a huge eps changes a weight by learning_rate * g / (|g| + eps), which is K * g with K =
learning_rate / eps, exact to float32's rounding. With K a million, what the weight was before the step vanishes in that
rounding, so the difference divided by K gives g back with a relative error of 1e-7.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from verl_engine.batch.sequence import Sequence
from verl_engine.engine.base import LossFn
from verl_engine.engine.train_step import Normalizer, StepReport
from verl_engine.testing.conformance.check import require
from verl_engine.testing.conformance.driver import Driver, differences, same
from verl_engine.testing.conformance.reference import weighted_loss

_EPS: Final = 1e8
_FACTOR: Final = 1e6

PROBE_SETTINGS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "learning_rate": _EPS * _FACTOR,
        "eps": _EPS,
        "betas": (0.0, 0.0),
        "weight_decay": 0.0,
        "max_grad_norm": 1e30,
        "warmup_steps": 0,
        "lr_schedule": "constant",
    }
)
"""Fields of the engine section that make the optimizer give the gradient away."""


class GradientProbe:
    """An engine that shows its gradient. It stays the same engine where its weights can be put back."""

    def __init__(self, build: Callable[[], Driver], gaps: Mapping[str, str]) -> None:
        """Build the engine, with `PROBE_SETTINGS`."""
        self._build = build
        self.driver = build()
        self.start = self.driver.weights()
        self.report: StepReport | None = None
        """Of the last gradient's step."""
        self._can_import = "weight_import" not in gaps
        self._snapshots = None if self._can_import or "snapshots" in gaps else self.driver.snapshots()
        if self._snapshots is not None:
            self._snapshots.save("start")

    def gradient(
        self,
        micro_batches: list[list[Sequence]],
        loss_fn: LossFn = weighted_loss,
        temperature: float = 1.0,
        normalizer: Normalizer = "tokens",
    ) -> dict[str, torch.Tensor]:
        """Return the whole gradient over this rank's micro-batches, as the optimizer gets it after clipping."""
        self.report = self.driver.step(micro_batches, loss_fn, temperature, normalizer)
        after = self.driver.weights()
        found = {name: ((self.start[name].double() - after[name].double()) / _FACTOR).float() for name in after}
        self._put_back()
        return found

    def gradient_of(self, sequences: list[Sequence], num_micro_batches: int = 2) -> dict[str, torch.Tensor]:
        """Return the gradient of a global batch, divided over ranks and micro-batches."""
        return self.gradient(self.driver.micro_batches(sequences, num_micro_batches))

    def _put_back(self) -> None:
        if self._can_import:
            self.driver.engine.load_full_weights(self.start.items())
        elif self._snapshots is not None:
            self._snapshots.restore("start")
        else:
            self.driver = self._build()
        now = self.driver.weights()
        require(same(now, self.start), f"weights could not be put back: {differences(now, self.start)}")
