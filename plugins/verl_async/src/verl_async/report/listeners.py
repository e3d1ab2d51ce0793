"""Several listeners behind one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_async.asynchrony.listener import JobListener


class Listeners:
    """Passes every event on to each listener, in order. What one raises ends the job: nothing is swallowed."""

    def __init__(self, listeners: Sequence[JobListener]) -> None:
        """Keep the listeners."""
        self._listeners = tuple(listeners)

    def on_status(self, text: str) -> None:
        """Pass on what the job does now."""
        for listener in self._listeners:
            listener.on_status(text)

    def on_note(self, text: str) -> None:
        """Pass on what is said of the job."""
        for listener in self._listeners:
            listener.on_note(text)

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Pass on the figures of a step."""
        for listener in self._listeners:
            listener.on_step(step, num_steps, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the figures of an evaluation."""
        for listener in self._listeners:
            listener.on_evaluation(step, metrics)
