"""How a job ends: whatever fails beside training, its results and its model are there, and the exit code tells."""

from __future__ import annotations

import json
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from plugins.verl_async.tests.fake_jobs import LAUNCH, METRICS, read_summary, report_steps, run_fake_job
from verl_async.job import load_train_job
from verl_async.report.output_folder import OutputError
from verl_engine.contract.errors import EngineError, StuckError

if TYPE_CHECKING:
    from pathlib import Path

    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.report.output_folder import OutputFolder

# One that finishes, and saves a model.
SHORT_DRIVER = """
import sys, time, types

driver = types.ModuleType("verl_async.ray.driver")
sys.modules["verl_async.ray.driver"] = driver


def run(job, output, listener, timeline):
    for step in range(1, 4):
        listener.on_status(f"step {step} comes")
        time.sleep(0.3)
        listener.on_step(step, 3, {"loss": 0.5})
    output.model.mkdir()


driver.run_train_job = run
"""


@pytest.mark.fault(13)
@pytest.mark.parametrize(
    "redirection", ["| head -n 1", ">&-", ">&- 2>&-", "2>&-", "> /dev/full", "> /dev/full 2> /dev/full"]
)
def test_a_job_whose_output_nobody_reads_finishes(recipe: Path, tmp_path: Path, redirection: str) -> None:
    words = [sys.executable, "-c", SHORT_DRIVER + LAUNCH.partition("try:")[0] + "main()", "train", str(recipe)]
    command = f'"$@" {redirection}; exit "${{PIPESTATUS[0]}}"'
    arguments = ["bash", "-c", command, "bash", *words, "-o", str(tmp_path / "output")]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert read_summary(tmp_path / "output")["status"] == "finished"
    assert (tmp_path / "output" / "model").exists()
    assert len((tmp_path / "output" / "metrics.jsonl").read_text().splitlines()) == 3
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("warning: PlainProgress failed") <= 1


@pytest.mark.fault(16)
def test_an_output_folder_deleted_while_the_job_runs_is_an_error(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"

    def run(folder: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 1)
        shutil.rmtree(output)
        for step in (2, 3):
            listener.on_step(step, 3, METRICS)
        folder.claim_again()
        folder.model.mkdir()

    with pytest.raises(OutputError, match=r"the job has finished, but its results are not whole: .* was deleted while"):
        run_fake_job(recipe, output, run)
    assert read_summary(output)["status"] == "failed"
    assert "was deleted while the job ran, and was made again" in read_summary(output)["error"]
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert load_train_job(output / "config.yaml") == load_train_job(recipe)


@pytest.mark.fault(13)
def test_metrics_that_cannot_be_written_do_not_end_the_job(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OutputError("cannot write metrics.jsonl: No space left on device")

    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 1)
        with monkeypatch.context() as disk:
            disk.setattr("verl_async.report.metrics_log.MetricsLog.on_step", full)
            listener.on_step(2, 3, METRICS)
        listener.on_step(3, 3, METRICS)

    with pytest.raises(OutputError, match=r"the job has finished, but .* metrics\.jsonl could not be written"):
        run_fake_job(recipe, tmp_path / "output", run)
    lines = (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]  # written again from memory


@pytest.mark.fault(15)
def test_an_exit_inside_a_job_does_not_end_it_well(recipe: Path, tmp_path: Path) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 1)
        sys.exit(0)

    with pytest.raises(EngineError, match=r"ended it by sys\.exit\(0\)"):
        run_fake_job(recipe, tmp_path / "output", run)
    assert read_summary(tmp_path / "output")["status"] == "failed"


@pytest.mark.fault(17)
def test_the_whole_story_of_a_failure_is_in_a_file_for_its_user_only(recipe: Path, tmp_path: Path) -> None:
    def run(*_: object) -> None:
        raise StuckError("trainer rank 1 did not answer") from RuntimeError("psql --password=secret")

    with pytest.raises(StuckError):
        run_fake_job(recipe, tmp_path / "output", run)
    log = tmp_path / "output" / "error.log"
    assert "psql --password=secret" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    for name in ("summary.json", "report.html"):
        assert "secret" not in (tmp_path / "output" / name).read_text()
