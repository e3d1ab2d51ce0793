"""Who is told how a job goes: progress on the screen, the metrics file, tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class JobListener(Protocol):
    """Called from the driver's event loop; must not block for long."""

    def on_status(self, text: str) -> None:
        """Say in a few words what the job does now, such as ``starting 2 trainer ranks``."""

    def on_note(self, text: str) -> None:
        """Take a line that should stay to be read, such as a choice that the engine made."""

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a finished training step; steps count from 1."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation after `step` training steps."""
