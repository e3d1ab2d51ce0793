from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import typer
import yaml

from plugins.verl_async.tests.job_files import sft_settings, train_settings, write_backend, write_recipe
from verl_async.asynchrony.timeline import Span
from verl_async.command.run_job import JobKind, JobRequest, framework_notes, run_job
from verl_async.errors import DataError
from verl_async.job import load_train_job
from verl_async.preflight import check_train_job
from verl_async.report.output_folder import OutputError
from verl_engine.contract.errors import EngineError, StuckError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from verl_async.asynchrony.listener import JobListener
    from verl_async.asynchrony.timeline import Timeline
    from verl_async.config import TrainJob
    from verl_async.report.output_folder import OutputFolder

# Runs the command, then tells which heavy modules that took.
LAUNCH = """
import sys
from verl_engine.command.app import main
try:
    main()
finally:
    heavy = {"torch", "transformers", "ray", "pyarrow", "matplotlib"} & set(sys.modules)
    print("heavy modules:", *sorted(heavy), file=sys.stderr)
"""

METRICS = {"loss": 0.5, "reward": 0.25, "exact_match": 0.25, "step_applied": 1.0}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with the toy backend, on the path of this process and of those that it starts."""
    folder = write_backend(tmp_path / "site")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.delitem(sys.modules, "toy_engine_hooks", raising=False)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, site: Path) -> Path:
    assert site.is_dir()
    return write_recipe(tmp_path / "recipe.yaml", train_settings(tmp_path))


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
    assert settings["rollout"]["engine"] == "embedded"
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
        f"verl-engine {command} recipes/addition_{'grpo' if command == 'train' else 'sft'}.yaml --dry-run"
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
        ("rollout.engine=embeded", _nothing, "did you mean embedded?"),
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


def _run(
    recipe: Path, output: Path, run: Callable[[OutputFolder, JobListener, Timeline], None], *, overwrite: bool = False
) -> None:
    def runner(job: TrainJob, output: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        assert job.trainer.num_steps == 3
        run(output, listener, timeline)

    kind = JobKind("train", load_train_job, check_train_job, lambda: runner)
    run_job(kind, JobRequest(recipe, (), output, overwrite=overwrite, dry_run=False))


def _steps(listener: JobListener, timeline: Timeline, number: int) -> None:
    listener.on_status("training")
    for step in range(1, number + 1):
        listener.on_step(step, 3, METRICS)
        timeline.spans.append(Span("trainer", "train", step - 1, step))


def _summary(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def test_a_finished_job_leaves_everything(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "output"

    def run(folder: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 3)
        folder.model.mkdir()

    _run(recipe, output, run)
    names = {entry.name for entry in output.iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "summary.json", "report.html", "timeline.jsonl", "tensorboard", "model"}
    assert names == expected
    assert load_train_job(output / "config.yaml") == load_train_job(recipe)
    assert _summary(output)["status"] == "finished"
    assert "error" not in _summary(output)
    printed = capsys.readouterr().out
    assert "finished after 3 steps" in printed
    assert str(output / "report.html") in printed
    assert str(output / "model") in printed


def test_steps_that_changed_nothing_are_pointed_out(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 2)
        listener.on_step(3, 3, {"step_applied": 0.0, "reward": 1.0})  # every group was left out

    _run(recipe, tmp_path / "output", run)
    assert "warning: 1 of the steps changed no weight" in capsys.readouterr().err


def test_a_job_that_reached_its_goal_is_stopped_early(recipe: Path, tmp_path: Path) -> None:
    _run(recipe, tmp_path / "output", lambda _, listener, timeline: _steps(listener, timeline, 1))
    assert _summary(tmp_path / "output")["status"] == "stopped early"


@pytest.mark.parametrize("error", [StuckError("trainer rank 1 did not answer"), KeyError("rank")])
def test_a_failed_job_keeps_its_results_and_the_reason(recipe: Path, tmp_path: Path, error: Exception) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 2)
        raise error

    with pytest.raises(type(error)) as caught:
        _run(recipe, tmp_path / "output", run)
    assert caught.value is error
    summary = _summary(tmp_path / "output")
    assert (summary["status"], summary["num_steps"]) == ("failed", 2)
    assert summary["error"] in {"trainer rank 1 did not answer", "KeyError: 'rank'"}
    assert (tmp_path / "output" / "report.html").exists()


def test_results_that_cannot_be_written_do_not_hide_the_failure(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(folder: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 1)
        folder.summary.mkdir()
        raise DataError("row 7 is too long")

    with pytest.raises(DataError, match="row 7"):
        _run(recipe, tmp_path / "output", run)
    assert "not all results could be written" in capsys.readouterr().err


def test_ctrl_c_keeps_the_results_and_ends_with_130(recipe: Path, tmp_path: Path) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 2)
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        _run(recipe, tmp_path / "output", run)
    assert caught.value.exit_code == 130
    assert _summary(tmp_path / "output")["status"] == "interrupted"
    assert (tmp_path / "output" / "report.html").exists()


def test_an_output_is_only_replaced_on_demand(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"
    _run(recipe, output, lambda _, listener, timeline: _steps(listener, timeline, 1))
    with pytest.raises(ValueError, match="pass --overwrite"):
        _run(recipe, output, lambda *_: None)
    _run(recipe, output, lambda _, listener, timeline: _steps(listener, timeline, 3), overwrite=True)
    assert _summary(output)["status"] == "finished"


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
    assert _summary(tmp_path / "output")["status"] == "finished"
    assert (tmp_path / "output" / "model").exists()
    assert len((tmp_path / "output" / "metrics.jsonl").read_text().splitlines()) == 3
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.stderr.count("warning: PlainProgress failed") <= 1


@pytest.mark.fault(16)
def test_an_output_folder_deleted_while_the_job_runs_is_an_error(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "output"

    def run(folder: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 1)
        shutil.rmtree(output)
        for step in (2, 3):
            listener.on_step(step, 3, METRICS)
        folder.claim_again()
        folder.model.mkdir()

    with pytest.raises(OutputError, match=r"the job has finished, but its results are not whole: .* was deleted while"):
        _run(recipe, output, run)
    assert _summary(output)["status"] == "failed"
    assert "was deleted while the job ran, and was made again" in _summary(output)["error"]
    assert [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert load_train_job(output / "config.yaml") == load_train_job(recipe)


@pytest.mark.fault(13)
def test_metrics_that_cannot_be_written_do_not_end_the_job(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OutputError("cannot write metrics.jsonl: No space left on device")

    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 1)
        with monkeypatch.context() as disk:
            disk.setattr("verl_async.report.metrics_log.MetricsLog.on_step", full)
            listener.on_step(2, 3, METRICS)
        listener.on_step(3, 3, METRICS)

    with pytest.raises(OutputError, match=r"the job has finished, but .* metrics\.jsonl could not be written"):
        _run(recipe, tmp_path / "output", run)
    lines = (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]  # written again from memory


@pytest.mark.fault(15)
def test_an_exit_inside_a_job_does_not_end_it_well(recipe: Path, tmp_path: Path) -> None:
    def run(_: OutputFolder, listener: JobListener, timeline: Timeline) -> None:
        _steps(listener, timeline, 1)
        sys.exit(0)

    with pytest.raises(EngineError, match=r"ended it by sys\.exit\(0\)"):
        _run(recipe, tmp_path / "output", run)
    assert _summary(tmp_path / "output")["status"] == "failed"


@pytest.mark.fault(17)
def test_the_whole_story_of_a_failure_is_in_a_file_for_its_user_only(recipe: Path, tmp_path: Path) -> None:
    def run(*_: object) -> None:
        raise StuckError("trainer rank 1 did not answer") from RuntimeError("psql --password=secret")

    with pytest.raises(StuckError):
        _run(recipe, tmp_path / "output", run)
    log = tmp_path / "output" / "error.log"
    assert "psql --password=secret" in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    for name in ("summary.json", "report.html"):
        assert "secret" not in (tmp_path / "output" / name).read_text()


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
    assert _summary(tmp_path / "output")["status"] == "interrupted"
