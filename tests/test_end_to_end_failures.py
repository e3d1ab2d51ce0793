"""What fails in the middle of training: the message says what, and everything is ended."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import Cluster, Job
from tests.test_end_to_end_train import check_model_loads

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Ended, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LONG = "trainer.num_steps=100000"


@pytest.mark.fault(15)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fail_later", "raised LookupError: the judge has left"),
        ("exit_later", "ended the process that scores: it ended with exit status 0"),
    ],
)
def test_reward_function_fails(task: Task, tmp_path: Path, cluster: Cluster, function: str, message: str) -> None:
    settings = (LONG, f"reward.function=tests.end_to_end_rewards.{function}")
    with Job("train", task.train, tmp_path / "out", settings, cluster) as job:
        ended = job.wait()
    check_failed(ended, rf"sample \d+-\d+ \(prompt row \d+\) .*{message}")


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    ("setting", "actor", "name", "is_rescued"),
    [
        ("trainer.num_ranks=2", "TrainerActor", r"trainer rank \d", True),
        pytest.param("rollout.num_workers=2", "RolloutActor", r"rollouter-\d", False, marks=pytest.mark.nightly),
    ],
)
def test_actor_is_killed(task: Task, tmp_path: Path, setting: str, actor: str, name: str, is_rescued: bool) -> None:
    with Job("train", task.train, tmp_path / "out", (LONG, setting)) as job:
        job.wait_for_steps(2)
        victim = job.processes(f"ray::{actor}")[-1]
        os.kill(victim, signal.SIGKILL)
        ended = job.wait(120)
    check_failed(ended, rf"{name} died \(process {victim}\): .*out of memory.*/logs")
    label = ended.output / "model" / "RESCUED.txt"
    assert label.exists() is is_rescued
    if is_rescued:
        assert "The weights of the last sync (version" in label.read_text(encoding="utf-8")
        assert "The weights of the last sync (version" in ended.stderr


@pytest.mark.fault(14)
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_ray_itself_is_killed(task: Task, tmp_path: Path, name: str) -> None:
    with Job("train", task.train, tmp_path / "out", (LONG, "trainer.num_ranks=2")) as job:
        job.wait_for_steps(2)
        [victim] = [number for number in job.processes() if job.program(number) == name]
        os.kill(victim, signal.SIGKILL)
        ended = job.wait(120)
    check_failed(ended, rf"Ray's own process {name} \(process {victim}\) ended, without which")
    assert not (ended.output / "model" / "RESCUED.txt").exists()


@pytest.mark.fault(14)
@pytest.mark.nightly
def test_a_cluster_of_elsewhere_is_killed(task: Task, tmp_path: Path) -> None:
    with (
        Cluster.start(tmp_path) as cluster,
        Job("train", task.train, tmp_path / "out", (LONG, "trainer.num_ranks=2"), cluster) as job,
    ):
        job.wait_for_steps(2)
        cluster.kill_head()
        ended = job.wait(120)
    # Ray ends all processes of a head with it, the trainer's too.
    check_failed(ended, rf"the Ray cluster at {cluster.address} does not answer any more", is_model_there=False)
    assert "the model is lost" in ended.stderr


def check_failed(ended: Ended, message: str, *, is_model_there: bool = True) -> None:
    assert ended.code == 2, ended.stderr
    assert "error: " in ended.stderr
    assert "Traceback" not in ended.stderr
    assert re.search(message, ended.stderr), ended.stderr
    assert ended.summary["status"] == "failed"
    assert re.search(message, ended.summary["error"])
    assert ended.summary["num_steps"] >= 1
    if is_model_there:
        check_model_loads(ended.output / "model")
    assert (ended.output / "error.log").exists()
