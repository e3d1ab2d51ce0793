from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml

from plugins.verl_async.tests.fake_jobs import LAUNCH, read_summary, report_steps, run_fake_job
from plugins.verl_async.tests.job_files import sft_settings, write_recipe
from verl_async.command.run_job import JobKind, JobRequest, framework_notes, run_job
from verl_async.errors import DataError
from verl_async.job import load_train_job
from verl_async.preflight import check_train_job
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.report.output_folder import OutputFolder


def _command(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", LAUNCH, *map(str, arguments)]
    environment = os.environ | {"COLUMNS": "200", "VERL_ENGINE_DEBUG": ""}
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=120)


def test_a_dry_run_prints_the_resolved_job_without_torch(recipe: Path, tmp_path: Path) -> None:
    done = _command("train", recipe, "engine.eps=1e-6", "--output", tmp_path / "output", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "heavy modules:\n"
    settings = yaml.safe_load(done.stdout)
    assert settings["engine"]["eps"] == 1e-6
    assert settings["engine"]["total_steps"] == 3
    assert settings["rollout"]["backend"] == "embedded"
    assert not (tmp_path / "output").exists()
    again = write_recipe(tmp_path / "again.yaml", settings)
    assert load_train_job(again) == load_train_job(recipe, ["engine.eps=1e-6"])


def test_a_dry_run_says_as_comments_what_the_engine_hands_to_its_framework(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_train_job(recipe, [])
    assert framework_notes(job) == ""
    handed: dict[str, Any] = {"sizes": {"shard": 2}, "names": ["a"]}
    config_class = type(job.engine)
    monkeypatch.setattr(config_class, "resolved_framework_config", lambda _, num_ranks: handed | {"n": num_ranks})
    printed = framework_notes(job)
    heading, *lines = printed.strip().splitlines()
    assert heading == "# What backend toy hands to its framework on 1 ranks:"
    assert yaml.safe_load("\n".join(line.removeprefix("# ") for line in lines)) == handed | {"n": 1}
    assert yaml.safe_load(printed) is None, "what is printed must stay a recipe"


def test_a_dry_run_of_sft(tmp_path: Path, site: Path) -> None:
    assert site.is_dir()
    recipe = write_recipe(tmp_path / "recipe.yaml", sft_settings(tmp_path))
    done = _command("sft", recipe, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "heavy modules:\n"
    assert yaml.safe_load(done.stdout)["trainer"]["batch_size"] == 4


@pytest.mark.parametrize("command", ["train", "sft"])
def test_help_teaches_by_examples(command: str) -> None:
    done = _command(command, "--help")
    assert done.returncode == 0
    assert done.stderr == "heavy modules:\n"
    assert (
        f"verl-engine {command} examples/addition_{'grpo' if command == 'train' else 'sft'}.yaml --dry-run"
        in done.stdout
    )


def _empty(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text("")


def _malformed(folder: Path) -> None:
    (folder / "prompts.jsonl").write_text("\n{]\n")


def _raising(folder: Path) -> None:
    (folder / "rewards.py").write_text("def score(**arguments):\n    raise RuntimeError('no judge')\n")


def _nothing(folder: Path) -> None:
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("override", "spoil", "expected"),
    [
        ("trainer.num_step=3", _nothing, "trainer.num_step is not a known key; did you mean trainer.num_steps?"),
        ("engine.backend=toi", _nothing, "engine.backend='toi' is not a known backend; did you mean toy?"),
        ("engine.backend=fsdp3", _nothing, "did you mean fsdp or fsdp2"),
        ("model.path=nowhere", _nothing, "nowhere does not exist"),
        ("data.seed=1", _empty, "the file holds no rows"),
        ("data.seed=1", _malformed, "prompts.jsonl, line 2: not valid JSON"),
        ("reward.function=nobody.score", _nothing, "module nobody cannot be imported"),
        ("reward.function=rewards.score", _raising, "sample 0 of sums, tried before the start (prompt row 0) raised"),
        ("trainer.num_ranks=3", _nothing, "do not divide over trainer.num_ranks=3"),
        ("rollout.backend=embeded", _nothing, "did you mean embedded?"),
        ("trainer.num_steps", _nothing, "override 'trainer.num_steps' has no '='"),
    ],
)
def test_bad_input_is_one_clear_error(
    recipe: Path, tmp_path: Path, override: str, spoil: Callable[[Path], None], expected: str
) -> None:
    spoil(tmp_path)
    done = _command("train", recipe, override, "--output", tmp_path / "output", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stderr
    assert expected in done.stderr
    assert done.stderr.endswith("heavy modules:\n")
    assert not (tmp_path / "output").exists()


def test_a_port_in_use_is_one_clear_error(recipe: Path, tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        done = _command("train", recipe, f"trainer.master_port={port}", "-o", tmp_path / "output")
    assert done.returncode == 2
    assert f"trainer.master_port={port} is in use" in done.stderr


def test_the_output_folder_must_be_named(recipe: Path) -> None:
    done = _command("train", recipe)
    assert done.returncode == 2
    assert "error: --output is missing" in done.stderr


def test_a_finished_job_leaves_everything(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output"

    def run(folder: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 3)
        folder.model.mkdir()

    run_fake_job(recipe, output, run)
    names = {entry.name for entry in output.iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "summary.json", "report.html", "timeline.jsonl", "tensorboard", "model"}
    assert names == expected
    assert load_train_job(output / "config.yaml") == load_train_job(recipe)
    assert read_summary(output)["status"] == "finished"
    assert "error" not in read_summary(output)
    printed = capsys.readouterr().out
    assert "finished after 3 steps" in printed
    assert str(output / "report.html") in printed
    assert str(output / "model") in printed


def test_steps_that_changed_nothing_are_pointed_out(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 2)
        listener.on_step(3, 3, {"step_applied": 0.0, "reward": 1.0})  # every group was left out

    run_fake_job(recipe, tmp_path / "output", run)
    assert "warning: 1 of the steps changed no weight" in capsys.readouterr().err


def test_a_job_that_reached_its_goal_is_stopped_early(recipe: Path, tmp_path: Path) -> None:
    run_fake_job(recipe, tmp_path / "output", lambda _, listener, timeline: report_steps(listener, timeline, 1))
    assert read_summary(tmp_path / "output")["status"] == "stopped early"


@pytest.mark.parametrize("error", [StuckError("trainer rank 1 did not answer"), KeyError("rank")])
def test_a_failed_job_keeps_its_results_and_the_reason(recipe: Path, tmp_path: Path, error: Exception) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 2)
        raise error

    with pytest.raises(type(error)) as caught:
        run_fake_job(recipe, tmp_path / "output", run)
    assert caught.value is error
    summary = read_summary(tmp_path / "output")
    assert (summary["status"], summary["num_steps"]) == ("failed", 2)
    assert summary["error"] in {"trainer rank 1 did not answer", "KeyError: 'rank'"}
    assert (tmp_path / "output" / "report.html").exists()


def test_results_that_cannot_be_written_do_not_hide_the_failure(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 1)
        folder.summary.mkdir()
        raise DataError("row 7 is too long")

    with pytest.raises(DataError, match="row 7"):
        run_fake_job(recipe, tmp_path / "output", run)
    assert "not all results could be written" in capsys.readouterr().err


def test_ctrl_c_keeps_the_results_and_ends_with_130(recipe: Path, tmp_path: Path) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        report_steps(listener, timeline, 2)
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        run_fake_job(recipe, tmp_path / "output", run)
    assert caught.value.exit_code == 130
    assert read_summary(tmp_path / "output")["status"] == "interrupted"
    assert (tmp_path / "output" / "report.html").exists()


def test_an_output_is_only_replaced_on_demand(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    run_fake_job(recipe, output, lambda _, listener, timeline: report_steps(listener, timeline, 1))
    with pytest.raises(ValueError, match="pass --overwrite"):
        run_fake_job(recipe, output, lambda *_: None)
    run_fake_job(recipe, output, lambda _, listener, timeline: report_steps(listener, timeline, 3), overwrite=True)
    assert read_summary(output)["status"] == "finished"


def test_what_is_not_installed_fails_before_the_output_is_made(recipe: Path, tmp_path: Path) -> None:
    def import_runner() -> Any:
        raise ModuleNotFoundError("No module named 'ray'")

    kind = JobKind("train", load_train_job, check_train_job, import_runner)
    with pytest.raises(ModuleNotFoundError):
        run_job(kind, JobRequest(recipe, (), tmp_path / "output", overwrite=False, dry_run=False))
    assert not (tmp_path / "output").exists()


# A driver of plain asyncio in place of Ray's: it says when it started, and cleans up when it is cancelled.
FAKE_DRIVER = """
import asyncio, sys, types
from pathlib import Path

driver = types.ModuleType("verl_async.ray.driver")
sys.modules["verl_async.ray.driver"] = driver


async def train(output, listener):
    listener.on_step(1, 3, {"loss": 0.5})
    listener.on_status("started")
    try:
        await asyncio.sleep(60)
    finally:
        Path(output.path / "shut-down").touch()


driver.run_train_job = lambda job, output, listener, timeline: asyncio.run(train(output, listener))
"""


@pytest.mark.fault(14)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_shuts_the_job_down(recipe: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-c", FAKE_DRIVER + LAUNCH, "train", str(recipe), "-o", str(tmp_path / "output")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "started" in line:
                break
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 130, rest
    assert "Traceback" not in rest
    assert "interrupted after 1 steps" in rest
    assert (tmp_path / "output" / "shut-down").exists()
    assert read_summary(tmp_path / "output")["status"] == "interrupted"
