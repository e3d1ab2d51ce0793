"""Progress as plain lines: for log files and CI, where a moving panel would be noise."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from verl_async.report.progress_state import ProgressState, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType
    from typing import Self, TextIO


class PlainProgress:
    """A listener that prints every status and evaluation, and a step's line once every few seconds.

    The first and the last step are always printed. No control codes, no colours.
    """

    def __init__(self, stream: TextIO, *, every_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Print to `stream`, at most one step in `every_s` seconds."""
        self._stream = stream
        self._every_s = every_s
        self._state = ProgressState(clock)
        self._printed_step = 0
        self._printed_s = 0.0

    def __enter__(self) -> Self:
        """Return the display itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Print the last step, if it was not printed yet."""
        if self._state.step != self._printed_step:
            self._print_step()

    def on_status(self, text: str) -> None:
        """Print what the job does now, unless it was said before."""
        if text != self._state.status:
            self._state.status = text
            self._print(text)

    def on_note(self, text: str) -> None:
        """Print what is said of the job."""
        self._print(text)

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of a step, when it is time."""
        self._state.take_step(step, num_steps, metrics)
        is_due = self._state.elapsed_s - self._printed_s >= self._every_s
        if is_due or self._printed_step == 0 or step == num_steps:
            self._print_step()

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of an evaluation."""
        self._state.take_evaluation(step, metrics)
        self._print(f"evaluation: {self._state.evaluation_text()}")

    def _print_step(self) -> None:
        state = self._state
        self._printed_step, self._printed_s = state.step, state.elapsed_s
        shown = ", ".join(f"{label} {text}" for label, text in state.shown())
        left = "" if state.left_s is None else f" ({duration(state.left_s)} left)"
        self._print(f"step {state.step}/{state.num_steps}{left}: {shown}")

    def _print(self, text: str) -> None:
        print(f"[{duration(self._state.elapsed_s)}] {text}", file=self._stream, flush=True)
