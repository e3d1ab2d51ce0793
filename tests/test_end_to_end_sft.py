"""`verl-engine sft`, whole jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import read_lines, run
from tests.test_end_to_end_train import check_training

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_with_evaluation(task: Task, tmp_path: Path, cluster: Cluster, num_ranks: int) -> None:
    sums = f"{{prompts: {task.model.parent}/held_out.jsonl, num_prompts: 8, temperature: 0}}"
    settings = (f"evaluation={{sets: {{sums: {sums}}}, every_steps: 2}}", f"trainer.num_ranks={num_ranks}")
    ended = run("sft", task.sft, tmp_path / "out", *settings, cluster=cluster)
    check_training(ended, task.model)
    assert [record["step"] for record in ended.records("evaluation")] == [0, 2, 3]


@pytest.mark.nightly
def test_without_evaluation_starts_no_rollout_worker(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    ended = run("sft", task.sft, tmp_path / "out", cluster=cluster)
    check_training(ended, task.model)
    assert "rollout workers (0)" in ended.stdout
    assert {span["who"] for span in read_lines(ended.output / "timeline.jsonl")} == {"trainer"}
