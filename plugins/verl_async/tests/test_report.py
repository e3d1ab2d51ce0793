"""The report: well-formed, self-contained, with the right metrics, for any length of run."""

from __future__ import annotations

import math
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from plugins.verl_async.tests.report_jobs import (
    lockstep_spans,
    sft_job,
    sft_record,
    train_job,
    train_metrics,
    train_record,
)
from verl_async.orchestrator.timeline import Span
from verl_async.report.output_folder import OutputFolder
from verl_async.report.record import RunRecord
from verl_async.report.report import render_report, write_report
from verl_async.report.summary import build_summary

if TYPE_CHECKING:
    from verl_async.config import SftJob, TrainJob

_VOID: Final = {"meta", "link", "img", "br", "hr", "input", "source"}


class Page(HTMLParser):
    """Collects what the tests ask for, and fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.charts: list[str] = []
        self.words: dict[str, list[str]] = {"dt": [], "dd": [], "h3": [], "pre": [], "li": [], "p": []}
        self.num_drawn: int = 0
        self.feed(text)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open_tags.append(tag)
        self._take(tag, dict(attrs))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._take(tag, dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag, words in self.words.items():
            if tag in self.open_tags and data.strip():
                words.append(data.strip())

    def _take(self, tag: str, attrs: dict[str, str | None]) -> None:
        self.ids += [value for name, value in attrs.items() if name == "id" and value]
        self.links += [value for name, value in attrs.items() if name in {"src", "href", "xlink:href"} and value]
        self.num_drawn += tag == "path"
        if tag == "svg":
            self.charts.append(attrs["aria-label"] or "")


def _render(job: TrainJob | SftJob, record: RunRecord, spans: list[Span]) -> tuple[str, Page]:
    summary = build_summary(job, record, spans, status="finished", seconds=75.0)
    text = render_report(job, record, spans, summary)
    return text, Page(text)


def test_cards_show_the_summary(tmp_path: Path) -> None:
    folder, job, record, spans = OutputFolder.create(tmp_path), train_job(), train_record(4), lockstep_spans(4)
    write_report(folder, job, record, spans, build_summary(job, record, spans, status="finished", seconds=75.0))
    page = Page(folder.report.read_text(encoding="utf-8"))
    labels = {"Exact match, sums", "pass@4, sums", "Exact match, chess", "Waited for evaluation"}
    assert labels | {"Trainer idle", "Rollouters idle", "Stale samples"} <= set(page.words["dt"])
    assert {"0.250 → 0.750", "0.125 → 0.125", "1.5 s", "0.300 → 0.800", "0:01:15", "4", "8", "50%", "1,000"} <= set(
        page.words["dd"]
    )


def test_a_train_job_has_every_chart() -> None:
    _, page = _render(train_job(), train_record(4), lockstep_spans(4))
    assert page.charts == [
        "Evaluation on sums over training steps",
        "Evaluation on chess over training steps",
        "Reward and exact match over training steps",
        "Loss over training steps",
        "Gradient norm over training steps",
        "Response length over training steps",
        "Staleness over training steps",
        "Learning rate over training steps",
        "Throughput over training steps",
        "Idle time over training steps",
        "Clipped and cut off over training steps",
        "Timeline: what each actor did when",
    ]
    assert {"reward", "exact match", "pass@4", "train", "wait for trainer"} <= set(page.words["li"])


def test_an_sft_job_leaves_rollout_charts_out() -> None:
    text, page = _render(sft_job(), sft_record(4), [Span("trainer", "train", 0.0, 1.0)])
    names = ("Loss", "Gradient norm", "Learning rate", "Throughput")
    assert page.charts == [f"{name} over training steps" for name in names] + ["Timeline: what each actor did when"]
    assert "Supervised training" in text
    assert "Rollouters idle" not in text


def test_nothing_is_loaded_from_elsewhere() -> None:
    text, page = _render(train_job(), train_record(60), lockstep_spans(300))
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert all(link.startswith("#") for link in page.links)


def test_ids_are_unique_and_links_lead_to_them() -> None:
    _, page = _render(train_job(), train_record(60), lockstep_spans(300))
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)


def test_every_colour_follows_the_page() -> None:
    text, _ = _render(train_job(), train_record(60), lockstep_spans(300))
    drawings = text[text.index("<svg") :]
    assert "#0a00" not in text
    assert "#000000" not in drawings
    assert "#ffffff" not in drawings
    assert "var(--blue)" in drawings


@pytest.mark.parametrize("num_steps", [0, 1, 2, 40, 1500])
def test_runs_of_any_length_make_a_page(num_steps: int) -> None:
    text, page = _render(train_job(), train_record(num_steps, evaluations=False), lockstep_spans(num_steps))
    assert len(text) < 1_000_000
    if num_steps == 0:
        assert page.charts == []
        assert "No training step was finished, so there is nothing to draw." in page.words["p"]
    else:
        assert "Loss over training steps" in page.charts
        assert page.num_drawn > 0


def test_a_run_with_a_first_evaluation_only_says_so() -> None:
    record = RunRecord()
    record.on_evaluation(0, {"sums/exact_match": 0.25})
    _, page = _render(train_job(), record, [])
    assert {"0.250", "first evaluation; there is no second"} <= set(page.words["dd"])
    assert page.charts == ["Evaluation on sums over training steps"]


def test_figures_that_are_not_finite_leave_gaps() -> None:
    record = RunRecord()
    for step in range(1, 60):
        broken = {"loss": math.nan, "grad_norm": math.inf, "reward": math.nan} if step % 3 else {}
        record.on_step(step, 60, train_metrics(step) | broken)
    text, page = _render(train_job(), record, [])
    assert "Loss over training steps" in page.charts
    assert "nan" not in text[text.index("<svg") :].lower()


def test_a_reward_that_is_the_exact_match_is_drawn_once() -> None:
    record = RunRecord()
    for step in (1, 2):
        record.on_step(step, 2, {"reward": step / 10, "exact_match": step / 10})
    record.on_evaluation(2, {"sums/reward": 0.2, "sums/exact_match": 0.2})
    _, page = _render(train_job(), record, [])
    assert page.words["li"] == ["reward = exact match"] * 2


def test_a_long_run_is_drawn_whole_and_zoomed_in() -> None:
    _, page = _render(train_job(), train_record(4), lockstep_spans(5000, step_s=0.2))
    assert page.charts[-2:] == [
        "Timeline of the whole run: share of time on each activity",
        "Timeline, zoomed in: what each actor did when",
    ]


def test_many_rollouters_are_cut_and_the_rest_counted() -> None:
    spans = [Span(f"rollouter-{number}", "generate", 0.0, 1.0) for number in range(20)]
    text, _ = _render(train_job(), train_record(1), [*spans, Span("trainer", "train", 0.0, 1.0)])
    assert "Not shown: 9 more actors." in text
    assert text.index(">rollouter-2<") < text.index(">rollouter-10<")
    assert ">rollouter-11<" not in text


def test_the_config_is_there_and_escaped() -> None:
    job = train_job().model_copy(update={"model": train_job().model.model_copy(update={"path": Path("<b>&model")})})
    text, page = _render(job, train_record(1), [])
    assert "path: <b>&model" in "".join(page.words["pre"])
    assert "<b>" not in text


def test_a_failed_run_says_why() -> None:
    job, record = train_job(), train_record(1)
    summary = build_summary(job, record, [], status="failed", seconds=1.0)
    page = Page(render_report(job, record, [], summary | {"error": "rollouter-0 did not answer <in time>"}))
    assert "rollouter-0 did not answer <in time>" in page.words["pre"]
