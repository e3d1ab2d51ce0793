"""Progress: a panel on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from plugins.verl_async.tests.report_jobs import evaluated, sft_metrics, train_metrics
from verl_async.report.live_progress import LiveProgress
from verl_async.report.plain_progress import PlainProgress
from verl_async.report.progress import open_progress
from verl_async.report.progress_state import ProgressState, duration, sparkline


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def _drawn(display: LiveProgress, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(display)
    return capture.get()


def test_duration_is_in_hours_minutes_seconds() -> None:
    assert [duration(seconds) for seconds in (0, 61.9, 3723)] == ["0:00:00", "0:01:01", "1:02:03"]


def test_sparkline_by_hand() -> None:
    assert sparkline([0.0, 7.0], 10) == "▁█"
    assert sparkline([0.0, 2.0, 6.0, 8.0], 2) == "▁█"  # the means of both halves are 1 and 7
    assert sparkline([3.0, 3.0], 5) == "▁▁"
    assert sparkline([1.0, float("nan"), float("inf"), 2.0], 5) == "▁█"
    assert sparkline([], 5) == sparkline([1.0], 0) == ""


def test_time_left_by_hand() -> None:
    clock = Clock()
    state = ProgressState(clock)
    state.take_step(1, 10, {})
    assert state.left_s is None
    clock.now_s += 4
    state.take_step(3, 10, {})  # 2 s a step, 7 steps to go
    assert state.left_s == pytest.approx(14)
    clock.now_s += 1
    assert state.left_s == pytest.approx(13)


def test_the_panel_shows_every_figure() -> None:
    display = LiveProgress(Console(file=io.StringIO()), "verl-engine train")
    display.on_status("training [with brackets]")
    display.on_evaluation(0, evaluated(0.25, 0.3))
    display.on_step(1, 40, train_metrics(1))
    display.on_step(2, 40, train_metrics(2))
    text = _drawn(display)
    for piece in (
        "verl-engine train", "step 2/40", "0.020", "0.010", "0.50 (max 1)", "6.0 tokens", "1,000 tokens/s", "25%",
        "50%", "reward trend", "▁█", "sums: exact match 0.250, reward 0.300, pass@4 1.000;",
        "training [with brackets]",
    ):  # fmt: skip
        assert piece in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_panel_fits_any_width(width: int) -> None:
    display = LiveProgress(Console(file=io.StringIO()), "verl-engine train")
    display.on_status("a status that is far longer than the narrow terminal that it has to fit into")
    display.on_step(1, 4, train_metrics(1))
    assert max(len(line) for line in _drawn(display, width).splitlines()) <= width


def test_the_panel_is_drawn_before_the_first_step() -> None:
    assert "step 0/?" in _drawn(LiveProgress(Console(file=io.StringIO()), "verl-engine train"))


def test_an_sft_job_shows_no_rollout_figures() -> None:
    display = LiveProgress(Console(file=io.StringIO()), "verl-engine sft")
    display.on_step(1, 4, sft_metrics(1))
    text = _drawn(display)
    assert "loss" in text
    assert not any(word in text for word in ("reward", "staleness", "idle", "evaluation"))


def test_a_skipped_step_is_marked() -> None:
    state = ProgressState()
    state.take_step(1, 4, {"grad_norm": float("nan"), "step_applied": 0.0})
    assert dict(state.shown())["grad norm"] == "nan (step skipped)"


def test_a_terminal_gets_the_panel_and_its_cursor_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with open_progress("verl-engine train", stream) as display:
        assert isinstance(display, LiveProgress)
        display.on_step(1, 4, train_metrics(1))
    assert "step 1/4" in stream.getvalue()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")


def test_the_terminal_is_given_back_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(KeyboardInterrupt), open_progress("verl-engine train", stream):
        raise KeyboardInterrupt
    assert "\x1b[?25h" in stream.getvalue()


@pytest.mark.parametrize(("stream", "term"), [(io.StringIO(), "xterm"), (Terminal(), "dumb")])
def test_elsewhere_lines_are_plain(stream: io.StringIO, term: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with open_progress("verl-engine train", stream) as display:
        assert isinstance(display, PlainProgress)
        display.on_status("starting 2 trainer ranks")
        display.on_step(1, 4, train_metrics(1))
        display.on_evaluation(1, {"sums/exact_match": 0.5})
    assert stream.getvalue().isascii()
    assert stream.getvalue().isprintable() is False  # line ends, and nothing else:
    assert stream.getvalue().replace("\n", "").isprintable()


def test_plain_lines_by_hand() -> None:
    stream, clock = io.StringIO(), Clock()
    with PlainProgress(stream, every_s=5, clock=clock) as display:
        display.on_status("starting")
        display.on_status("starting")
        for step in range(1, 9):
            clock.now_s += 2
            display.on_step(step, 10, {"loss": 0.5})
        display.on_evaluation(8, {"sums/exact_match": 0.5, "seconds": 1.0})
    assert stream.getvalue().splitlines() == [
        "[0:00:00] starting",
        "[0:00:02] step 1/10: loss 0.5",
        "[0:00:08] step 4/10 (0:00:12 left): loss 0.5",
        "[0:00:14] step 7/10 (0:00:06 left): loss 0.5",
        "[0:00:16] evaluation: sums: exact match 0.500 (after step 8)",
        "[0:00:16] step 8/10 (0:00:04 left): loss 0.5",
    ]
