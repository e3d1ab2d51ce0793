"""Ranks that split sequences train as one rank does, through the whole command."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import run
from tests.test_end_to_end_train import check_training, read_weights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster, Ended, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def train(task: Task, cluster: Cluster, folder: Path, *settings: str) -> Ended:
    """Make one step on recomputed log-probs; by SGD, whose step is the gradient itself."""
    ended = run(
        "train", task.train, folder, "trainer.num_steps=1", "async_training={staleness_threshold: 0}",
        "trainer.max_tokens_per_micro_batch=100", "algorithm.old_log_probs=recompute",
        "engine.optimizer=torch.optim.SGD", "engine.learning_rate=1.0", *settings, cluster=cluster,
    )  # fmt: skip
    check_training(ended, task.model)
    return ended


@pytest.mark.nightly
def test_two_ranks_that_split_sequences_train_as_one_rank(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    one = train(task, cluster, tmp_path / "one")
    two = train(task, cluster, tmp_path / "two", "trainer.num_ranks=2", "engine.sequence_parallel_size=2")
    (expected,), (found,) = one.records("step"), two.records("step")
    for name in (
        "reward",
        "response_tokens",
        "loss",
        "grad_norm",
        "importance_weight",
        "clip_fraction",
        "staleness_max",
    ):
        assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    before, trained = read_weights(task.model), read_weights(one.output / "model")
    for name, weight in read_weights(two.output / "model").items():
        largest_change = float((trained[name] - before[name]).abs().max())
        assert float((weight - trained[name]).abs().max()) <= 1e-4 * largest_change + 1e-8, name
