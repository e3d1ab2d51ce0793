"""The demo's recipe for Megatron, a few steps of it on two ranks; and Megatron trains as fsdp2 does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import run
from tests.repository import ROOT
from tests.test_end_to_end_train import check_model_loads, check_training, read_weights

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster, Ended, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]

RECIPE = ROOT / "examples" / "addition_grpo_megatron.yaml"


def test_the_recipe_trains_on_two_ranks_that_split_each_layer(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    folder = task.model.parent
    ended = run(
        "train", RECIPE, tmp_path / "out", f"model.path={task.model}", f"data.prompts={folder}/prompts.jsonl",
        f"evaluation={{sets: {{sums: {{prompts: {folder}/held_out.jsonl, num_prompts: 8}}}}}}",
        "engine.device=cpu", "rollout.device=cpu",
        "reward.function=tests.end_to_end_rewards.count_even", "trainer.num_steps=3", "trainer.mini_batch_size=4",
        "engine.warmup_steps=1", "rollout.max_batch_prompts=4", "trainer.num_ranks=2", "engine.tensor_parallel_size=2",
        cluster=cluster,
    )  # fmt: skip
    check_training(ended, task.model)
    assert [record["step"] for record in ended.records("evaluation")] == [0, 3]
    check_model_loads(ended.output / "model")


@pytest.mark.nightly
def test_two_pipeline_ranks_train_as_one_rank_of_fsdp2(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    one = train(task, cluster, tmp_path / "one")
    two = train(
        task, cluster, tmp_path / "two", "engine={backend: megatron, learning_rate: 1e-3, device: cpu}",
        "trainer.num_ranks=2", "engine.pipeline_parallel_size=2",
    )  # fmt: skip
    (expected,), (found,) = one.records("step"), two.records("step")
    for name in ("reward", "response_tokens", "loss", "grad_norm", "importance_weight", "staleness_max"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    before, trained = read_weights(task.model), read_weights(one.output / "model")
    for name, weight in read_weights(two.output / "model").items():
        # AdamW's first step is nearly the gradient's sign, so a few entries of almost no gradient may differ.
        assert (weight - trained[name]).norm() <= 1e-2 * (trained[name] - before[name]).norm(), name


def train(task: Task, cluster: Cluster, folder: Path, *settings: str) -> Ended:
    """Make one step, on policy and with few tokens a micro-batch."""
    ended = run(
        "train", task.train, folder, "trainer.num_steps=1", "async_training={staleness_threshold: 0}",
        "trainer.max_tokens_per_micro_batch=100", "algorithm.old_log_probs=recompute", *settings, cluster=cluster,
    )  # fmt: skip
    check_training(ended, task.model)
    return ended
