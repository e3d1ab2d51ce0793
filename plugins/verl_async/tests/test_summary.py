"""The summary's metrics, worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from plugins.verl_async.tests.report_jobs import lockstep_spans, sft_job, sft_record, train_job, train_record
from verl_async.report.record import RunRecord
from verl_async.report.summary import build_summary
from verl_engine import __version__


@pytest.mark.fault(33)
def test_a_finished_run() -> None:
    summary = build_summary(train_job(4), train_record(4), lockstep_spans(4), status="finished", seconds=12.34567)
    versions = summary.pop("versions")
    assert summary == {
        "status": "finished",
        "backend": "fsdp2",
        "backend_distribution": f"verl-fsdp {__version__}",
        "exact_match_first": 0.25,
        "exact_match_last": 0.75,
        "reward_first": 0.3,
        "reward_last": 0.8,
        "measured_on": "evaluation set sums",
        "evaluations": {
            "sums": {
                "exact_match": (0.25, 0.75),
                "reward": (0.3, 0.8),
                "mean@4": (0.25, 0.75),
                "pass@2": (0.5, 0.5),
                "pass@4": (1.0, 1.0),
            },
            "chess": {"exact_match": (0.125, 0.125)},
        },
        "evaluation_wait_s": 1.5,
        "seconds": 12.346,
        "num_steps": 4,
        "num_steps_planned": 4,
        "num_steps_skipped": 0,
        "num_prompts": 4 * 2,
        "stale_samples": 8,
        "weight_versions": 4,
        "trainer_idle_ratio": 0.5,
        "rollouter_idle_ratio": 0.5,
        "warnings": [],
    }
    assert isinstance(versions, dict)
    assert list(versions) == ["verl-engine-core", "verl-async", "torch", "transformers", "ray"]


def test_without_evaluations_the_first_and_last_ten_steps_are_averaged() -> None:
    summary = build_summary(train_job(40), train_record(30, evaluations=False), [], status="stopped early", seconds=1.0)
    assert summary["reward_first"] == pytest.approx(0.055)  # mean of 0.01 to 0.10
    assert summary["reward_last"] == pytest.approx(0.255)  # mean of 0.21 to 0.30
    assert summary["exact_match_last"] == pytest.approx(0.1275)
    assert (summary["measured_on"], summary["num_steps"], summary["num_steps_planned"]) == ("training steps", 30, 40)


def test_a_run_that_ended_before_its_second_evaluation_has_no_last_figure() -> None:
    record = RunRecord()
    record.on_evaluation(0, {"sums/exact_match": 0.25, "sums/reward": 0.3})
    summary = build_summary(train_job(), record, [], status="interrupted", seconds=1.0)
    assert (summary["exact_match_first"], summary["exact_match_last"]) == (0.25, None)
    assert summary["evaluations"] == {"sums": {"exact_match": (0.25, None), "reward": (0.3, None)}}


def test_an_sft_run_has_no_rollout_figures() -> None:
    summary = build_summary(sft_job(), sft_record(3), [], status="finished", seconds=1.0)
    assert summary["num_prompts"] == 15
    for name in ("exact_match_first", "reward_last", "stale_samples", "weight_versions", "rollouter_idle_ratio"):
        assert summary[name] is None


def test_figures_that_are_not_finite_keep_the_summary_valid() -> None:
    record = RunRecord()
    record.on_step(1, 2, {"reward": math.nan, "step_applied": 0.0, "weight_version": math.inf})
    record.on_step(2, 2, {"reward": 0.5, "step_applied": 1.0})
    summary = build_summary(train_job(), record, [], status="failed", seconds=1.0)
    json.dumps(summary, allow_nan=False)
    assert (summary["reward_first"], summary["num_steps_skipped"], summary["weight_versions"]) == (0.5, 1, None)
