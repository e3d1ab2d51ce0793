"""Ctrl-C and SIGTERM: the job ends soon, what was learned is kept, and nothing is left running."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import Job
from tests.test_end_to_end_train import check_model_loads, read_weights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Ended, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def test_ctrl_c_saves_the_model_as_it_is(task: Task, tmp_path: Path) -> None:
    settings = ("trainer.num_steps=100000", "trainer.num_ranks=2", "async_training.staleness_threshold=1")
    with Job("train", task.train, tmp_path / "out", settings) as job:
        job.wait_for_steps(2)
        job.press_ctrl_c()
        ended = job.wait(60)
    check_interrupted(ended)
    check_model_loads(ended.output / "model")
    before, after = read_weights(task.model), read_weights(ended.output / "model")
    assert any((after[name] != before[name]).any() for name in before)


def test_sigterm_is_like_ctrl_c(task: Task, tmp_path: Path) -> None:
    with Job("sft", task.sft, tmp_path / "out", ("trainer.num_steps=100000",)) as job:
        job.wait_for_steps(2)
        job.terminate()
        ended = job.wait(60)
    check_interrupted(ended)
    assert (ended.output / "model" / "model.safetensors").exists()


def test_ctrl_c_while_ray_starts(task: Task, tmp_path: Path) -> None:
    with Job("train", task.train, tmp_path / "out") as job:
        job.wait_for_process("gcs_server")
        job.press_ctrl_c()
        ended = job.wait(60)
    check_interrupted(ended)
    assert not (ended.output / "model").exists()


def check_interrupted(ended: Ended) -> None:
    assert ended.code == 130, ended.stderr
    assert ended.summary["status"] == "interrupted"
    assert (ended.output / "report.html").exists()
    assert "Traceback" not in ended.stderr
