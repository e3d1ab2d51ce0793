"""Progress as one panel that is redrawn in place, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl_async.report.progress_state import ProgressState, duration, sparkline

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_TWO_COLUMNS_WIDTH = 64
_BORDER_WIDTH = 6


class LiveProgress:
    """A listener that shows the latest metrics; use it as a context manager. The last state stays on the screen."""

    def __init__(self, console: Console, title: str) -> None:
        """Draw on `console`; `title` heads the panel."""
        self._title = title
        self._state = ProgressState()
        self._live = Live(self, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        """Start to draw."""
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Draw the last state and give the terminal back."""
        self._live.stop()

    def on_status(self, text: str) -> None:
        """Show what the job does now."""
        self._state.status = text

    def on_note(self, text: str) -> None:
        """Print what is said of the job, above the panel."""
        self._live.console.print(text, highlight=False, markup=False)

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step."""
        self._state.take_step(step, num_steps, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an evaluation."""
        self._state.take_evaluation(step, metrics)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the panel; called by rich for every frame."""
        del console
        width = max(options.max_width - _BORDER_WIDTH, 10)
        parts: list[RenderableType] = [self._bar(), *self._metrics(width), *self._trend(width)]
        if self._state.evaluation:
            parts.append(Text.assemble(("evaluation  ", "dim"), (self._state.evaluation_text(), "bold")))
        if self._state.status:
            parts.append(Text(self._state.status, style="italic", no_wrap=True, overflow="ellipsis"))
        yield Panel(Group(*parts), title=self._title, title_align="left", border_style="cyan", padding=(0, 2))

    def _bar(self) -> RenderableType:
        state = self._state
        total = state.num_steps or None
        left = "" if state.left_s is None else f"  {duration(state.left_s)} left"
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True, justify="right")
        row.add_row(
            Text(f"step {state.step}/{total or '?'}", style="bold"),
            ProgressBar(total=total, completed=state.step, pulse=total is None, animation_time=state.elapsed_s),
            Text(f"{duration(state.elapsed_s)}{left}"),
        )
        return row

    def _metrics(self, width: int) -> list[RenderableType]:
        """Label and value pairs, two beside each other where there is room."""
        pairs = list(self._state.shown())
        columns = 2 if width >= _TWO_COLUMNS_WIDTH else 1
        grid = Table.grid(padding=(0, 2))
        for _ in range(columns):
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(style="bold", min_width=18, no_wrap=True)
        for start in range(0, len(pairs), columns):
            grid.add_row(*(text for pair in pairs[start : start + columns] for text in pair))
        return [grid] if pairs else []

    def _trend(self, width: int) -> list[RenderableType]:
        curve = sparkline(list(self._state.rewards), min(width - 16, 60))
        return [Text.assemble(("reward trend  ", "dim"), (curve, "green"))] if len(curve) > 1 else []
