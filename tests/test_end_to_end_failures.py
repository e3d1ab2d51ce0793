"""What fails in the middle of training: the message says what, and everything is ended."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import Job

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster, Ended, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]

LONG = "trainer.num_steps=100000"


def test_reward_function_raises(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    settings = (LONG, "reward.function=tests.end_to_end_rewards.fail_later")
    with Job("train", task.train, tmp_path / "out", settings, cluster) as job:
        ended = job.wait()
    check_failed(ended, r"sample \d+-\d+ \(prompt row \d+\) raised LookupError: the judge has left", saved=True)


@pytest.mark.parametrize(
    ("setting", "actor", "name", "saved"),
    [
        ("trainer.num_ranks=2", "TrainerActor", r"trainer rank \d", False),
        ("rollout.num_workers=2", "RolloutActor", r"rollouter-\d", True),
    ],
)
def test_actor_is_killed(task: Task, tmp_path: Path, setting: str, actor: str, name: str, saved: bool) -> None:
    with Job("train", task.train, tmp_path / "out", (LONG, setting)) as job:
        job.wait_for_steps(2)
        victim = job.processes(f"ray::{actor}")[-1]
        os.kill(victim, signal.SIGKILL)
        ended = job.wait(60)
    check_failed(ended, rf"{name} died \(process {victim}\): .*out of memory.*/logs", saved=saved)


def check_failed(ended: Ended, message: str, *, saved: bool) -> None:
    assert ended.code == 2, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert re.search(message, ended.stderr), ended.stderr
    assert ended.summary["status"] == "failed"
    assert re.search(message, ended.summary["error"])
    assert ended.summary["num_steps"] >= 1
    assert (ended.output / "model" / "model.safetensors").exists() is saved  # the steps so far, where a trainer lives
