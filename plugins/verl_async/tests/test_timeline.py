"""Spans, and the idle ratios that follow from them."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_async.orchestrator.timeline import WAITS, IdleRatios, Span, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let the timeline's clock stand still but for this."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds

    return sleep


def test_idle_ratio_by_hand() -> None:
    spans = [
        Span("trainer", "wait for samples", 0.0, 3.0),
        Span("trainer", "train", 3.0, 7.0),
        Span("trainer", "sync weights", 7.0, 8.0),
        Span("trainer", "wait for samples", 8.0, 10.0),
    ]
    assert IdleRatios(spans).of("trainer") == pytest.approx(0.5)  # busy 4 + 1 of 10 s


def test_overlapping_activities_count_once() -> None:
    spans = [
        Span("rollouter-0", "generate", 0.0, 6.0),
        Span("rollouter-0", "score", 4.0, 8.0),
        Span("rollouter-0", "score", 5.0, 5.5),
        Span("rollouter-0", "wait for trainer", 8.0, 10.0),
    ]
    assert IdleRatios(spans).of("rollouter") == pytest.approx(0.2)  # busy 0 to 8 of 10 s


def test_a_wait_during_something_else_is_not_idle() -> None:
    spans = [Span("rollouter-0", "wait for trainer", 0.0, 4.0), Span("rollouter-0", "evaluate", 1.0, 4.0)]
    assert IdleRatios(spans).of("rollouter") == pytest.approx(0.25)


def test_time_between_spans_is_idle_and_rollouters_are_averaged() -> None:
    spans = [
        Span("rollouter-0", "generate", 0.0, 1.0),
        Span("rollouter-0", "generate", 3.0, 4.0),
        Span("rollouter-1", "generate", 0.0, 9.0),
        Span("trainer", "train", 0.0, 100.0),
    ]
    assert IdleRatios(spans).of("rollouter") == pytest.approx((0.5 + 0.0) / 2)


def test_no_recorded_time_has_no_ratio() -> None:
    assert IdleRatios().of("trainer") is None
    assert IdleRatios([Span("trainer", "train", 1.0, 1.0)]).of("trainer") is None
    assert Timeline().idle_ratio("trainer") == 0.0


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["train", "score", *WAITS]), st.integers(0, 30), st.integers(0, 10)),
        min_size=1,
        max_size=20,
    )
)
def test_the_ratio_counts_the_seconds_in_which_nothing_was_busy(rows: list[tuple[str, int, int]]) -> None:
    """Against counting second by second; spans start and end on whole seconds."""
    spans = [Span("trainer", what, float(start), float(start + length)) for what, start, length in rows]
    seconds = range(min(start for _, start, _ in rows), max(start + length for _, start, length in rows))
    busy = {second for what, start, length in rows if what not in WAITS for second in range(start, start + length)}
    expected = 1 - len(busy) / len(seconds) if seconds else None
    assert IdleRatios(spans).of("trainer") == (pytest.approx(expected) if seconds else None)


def test_a_timeline_records_who_did_what_when(sleep: Callable[[float], None]) -> None:
    timeline = Timeline(_start_s=100.0)
    sleep(1.0)
    with timeline.span("trainer", "train"):
        sleep(2.0)
        with timeline.span("rollouter-0", "generate"):
            sleep(0.5)
    with suppress(ValueError), timeline.span("trainer", "sync weights"):
        sleep(1.0)
        raise ValueError("a failure")
    assert timeline.spans == [
        Span("rollouter-0", "generate", 3.0, 3.5),
        Span("trainer", "train", 1.0, 3.5),
        Span("trainer", "sync weights", 3.5, 4.5),
    ]


def test_the_ratio_so_far_is_that_of_the_spans_so_far(sleep: Callable[[float], None]) -> None:
    timeline = Timeline(_start_s=100.0)
    for what, seconds, expected in (
        ("train", 3.0, 0.0),
        ("wait for samples", 1.0, 0.25),
        ("sync weights", 1.0, 0.2),
        ("wait for samples", 5.0, 0.6),
        ("evaluate", 2.0, 0.5),
    ):
        with timeline.span("trainer", what):
            sleep(seconds)
        assert timeline.idle_ratio("trainer") == pytest.approx(expected)
        assert timeline.idle_ratio("trainer") == IdleRatios(timeline.spans).of("trainer")
    assert timeline.idle_ratio("rollouter") == 0.0


def test_many_short_spans_become_one(sleep: Callable[[float], None]) -> None:
    timeline = Timeline(_start_s=100.0)
    for _ in range(1000):
        with timeline.span("rollouter-0", "score"):
            sleep(0.0005)
        with timeline.span("rollouter-0", "wait for trainer"):
            sleep(0.0001)
    [span] = timeline.spans
    assert span.what == "score"
    assert span.start_s == pytest.approx(0.0)
    assert span.end_s == pytest.approx(1000 * 0.0006 - 0.0001)
    assert timeline.idle_ratio("rollouter") == pytest.approx(0.0)


def test_a_wait_that_matters_is_kept(sleep: Callable[[float], None]) -> None:
    timeline = Timeline(_start_s=100.0)
    for seconds in (0.002, 0.5):
        with timeline.span("rollouter-0", "score"):
            sleep(0.5)
        with timeline.span("rollouter-0", "wait for trainer"):
            sleep(seconds)
    assert [span.what for span in timeline.spans] == ["score", "wait for trainer"] * 2
