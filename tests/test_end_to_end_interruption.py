"""Ctrl-C and SIGTERM: the job ends soon, what was learned is kept, and nothing is left running."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import Job
from tests.test_end_to_end_train import check_model_loads, read_weights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Ended, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.fault(19)
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_ctrl_c_saves_the_model_as_it_is(task: Task, tmp_path: Path, num_ranks: int) -> None:
    settings = ("trainer.num_steps=100000", f"trainer.num_ranks={num_ranks}", "async_training.staleness_threshold=1")
    with Job("train", task.train, tmp_path / "out", settings) as job:
        job.wait_for_steps(2)
        check_nobody_else_gets_in(job)
        job.press_ctrl_c()
        ended = job.wait(60)
    check_interrupted(ended)
    check_model_loads(ended.output / "model")
    before, after = read_weights(task.model), read_weights(ended.output / "model")
    assert any((after[name] != before[name]).any() for name in before)


@pytest.mark.nightly
@pytest.mark.fault(12, 13, 14)
def test_a_lost_terminal_leaves_a_model_whose_generation_config_cannot_be_saved(task: Task, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(task.model, model)
    config = '{"temperature": 0.9, "top_p": 0.6}'  # as Llama 2's: transformers reads it, and refuses to write it
    (model / "generation_config.json").write_text(config, encoding="utf-8")
    settings = ("trainer.num_steps=100000", f"model.path={model}")
    with Job("train", task.train, tmp_path / "out", settings) as job:
        job.wait_for_steps(2)
        job.hang_up()
        ended = job.wait(120)
    check_interrupted(ended)
    check_model_loads(ended.output / "model")
    assert (ended.output / "model" / "generation_config.json").read_text(encoding="utf-8") == config


@pytest.mark.nightly
def test_sigterm_is_like_ctrl_c(task: Task, tmp_path: Path) -> None:
    with Job("sft", task.sft, tmp_path / "out", ("trainer.num_steps=100000",)) as job:
        job.wait_for_steps(2)
        job.terminate()
        ended = job.wait(60)
    check_interrupted(ended)
    assert (ended.output / "model" / "model.safetensors").exists()


@pytest.mark.nightly
def test_ctrl_c_while_ray_starts(task: Task, tmp_path: Path) -> None:
    with Job("train", task.train, tmp_path / "out") as job:
        job.wait_for_process("gcs_server")
        job.press_ctrl_c()
        ended = job.wait(60)
    check_interrupted(ended)
    assert not (ended.output / "model").exists()


# What any process of the machine could try: to ask Ray's server, without a token and with a wrong one.
ASK = """
import sys
from ray._raylet import GcsClient

GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"session")
"""


def check_nobody_else_gets_in(job: Job) -> None:
    servers = job.listening()
    assert servers
    assert {host for host, _ in servers} == {"127.0.0.1"}
    token = job.output / ".ray_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    [(host, port)] = job.listening("gcs_server")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    for keys, is_let_in in (
        ({"RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}, False),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}, True),
    ):
        words = [sys.executable, "-c", ASK, f"{host}:{port}"]
        done = subprocess.run(words, env=clean | keys, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode == 0) is is_let_in, (keys, done.stderr)
        assert is_let_in or "AuthenticationError" in done.stderr


def check_interrupted(ended: Ended) -> None:
    assert ended.code == 130, ended.stderr
    assert ended.summary["status"] == "interrupted"
    assert (ended.output / "report.html").exists()
    assert not (ended.output / ".ray_token").exists()
    assert "Traceback" not in ended.stderr
