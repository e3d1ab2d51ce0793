"""The metrics on disk: valid JSON lines at once, and events that TensorBoard reads."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from plugins.verl_async.tests.report_jobs import train_metrics
from verl_async.report.listeners import Listeners
from verl_async.report.metrics_log import MetricsLog
from verl_async.report.output_folder import OutputError, OutputFolder
from verl_async.report.record import RunRecord


def _refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is not JSON")


def _lines(folder: OutputFolder) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=_refuse) for line in folder.metrics.read_text().splitlines()]


def test_each_event_is_on_disk_before_the_call_returns(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    with MetricsLog(folder) as log:
        log.on_status("starting")
        log.on_evaluation(0, {"sums/exact_match": 0.25})
        assert [(line["kind"], line["step"], line["sums/exact_match"]) for line in _lines(folder)] == [
            ("evaluation", 0, 0.25)
        ]
        log.on_step(1, 4, train_metrics(1))
        last = _lines(folder)[-1]
    assert (last["kind"], last["step"], last["reward"]) == ("step", 1, 0.01)
    assert isinstance(last["time_s"], float)


def test_figures_that_are_not_finite_become_null(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    with MetricsLog(folder) as log:
        log.on_step(1, 1, {"loss": math.nan, "grad_norm": math.inf, "reward": -math.inf, "entropy": 1.5})
    line = _lines(folder)[0]
    assert [line[name] for name in ("loss", "grad_norm", "reward", "entropy")] == [None, None, None, 1.5]


def test_tensorboard_reads_the_events(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    with MetricsLog(folder) as log:
        log.on_evaluation(0, {"sums/exact_match": 0.25})
        log.on_step(1, 2, train_metrics(1))
        log.on_step(2, 2, train_metrics(2))
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    tags = events.Tags()["scalars"]
    assert {"train/loss", "train/reward", "trainer/idle_ratio", "evaluation/sums/exact_match"} <= set(tags)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("evaluation/sums/exact_match")] == [(0, 0.25)]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path)
    folder.metrics.unlink()
    folder.metrics.symlink_to("/dev/full")
    log = MetricsLog(folder)
    with pytest.raises(OutputError, match=r"cannot write .*metrics\.jsonl: No space left on device"):
        log.on_step(1, 1, {"loss": 1.0})
    with pytest.raises(OutputError, match="No space left"):
        log.close()


def test_a_folder_that_went_away_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*metrics\.jsonl: No such file"):
        MetricsLog(OutputFolder(tmp_path / "gone"))


def test_neither_torch_nor_tensorflow_nor_ray_is_imported() -> None:
    code = (
        "import sys, verl_async.report.metrics_log, verl_async.report.progress, verl_async.report.summary\n"
        "import verl_async.report.report\n"
        "print([name for name in ('torch', 'tensorflow', 'ray', 'transformers', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_listeners_pass_everything_on_in_order(tmp_path: Path) -> None:
    folder, first, second = OutputFolder.create(tmp_path), RunRecord(), RunRecord()
    with MetricsLog(folder) as log:
        everyone = Listeners([first, second, log])
        everyone.on_status("starting")
        everyone.on_evaluation(0, {"reward": 0.5})
        everyone.on_step(1, 3, {"reward": 0.6})
    assert [entry.metrics for entry in first.steps] == [entry.metrics for entry in second.steps] == [{"reward": 0.6}]
    assert [line["kind"] for line in _lines(folder)] == ["evaluation", "step"]
    assert second.num_steps == 3


class Failing(RunRecord):
    """Fails at every step."""

    def on_step(self, *_: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.fault(13)
def test_a_listener_that_fails_is_switched_off_with_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    failing, record = Failing(), RunRecord()
    everyone = Listeners([failing, record])
    for step in (1, 2):
        everyone.on_step(step, 2, {"reward": 0.6})
    assert len(record.steps) == 2
    assert [listener for listener, _ in everyone.failures] == [failing]
    assert capsys.readouterr().err == (
        "warning: Failing failed and is switched off; the job goes on. BrokenPipeError: [Errno 32] Broken pipe\n"
    )


@pytest.mark.fault(16)
def test_a_folder_that_is_deleted_is_noticed_though_its_files_are_open(tmp_path: Path) -> None:
    folder = OutputFolder.create(tmp_path / "out")
    with MetricsLog(folder) as log:
        log.on_step(1, 2, {"loss": 1.0})
        shutil.rmtree(folder.path)
        with pytest.raises(OutputError, match=r"metrics\.jsonl was deleted while the job ran"):
            log.on_step(2, 2, {"loss": 0.5})
