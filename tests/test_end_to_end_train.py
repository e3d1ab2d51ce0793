"""`verl-engine train`, whole jobs: what they leave behind, and every way that weights and samples can travel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.end_to_end import Job, read_lines, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end import Cluster, Ended, Task

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SUMMARY_KEYS = {
    "exact_match_first", "exact_match_last", "seconds", "num_steps", "stale_samples", "trainer_idle_ratio",
    "rollouter_idle_ratio",
}  # fmt: skip


@pytest.mark.nightly
def test_one_rank_leaves_complete_results(task: Task, tmp_path: Path) -> None:
    ended = run("train", task.train, tmp_path / "out", evaluation(task))
    check_training(ended, task.model)
    check_results(ended, 3, {"trainer", "rollouter-0", "scoring", "evaluation"})


@pytest.mark.nightly
def test_two_ranks_two_workers_on_policy(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    ended = run(
        "train", task.train, tmp_path / "out", "trainer.num_ranks=2", "rollout.num_workers=2",
        "async_training={staleness_threshold: 0, partial_rollout: false, require_batches: 2}",
        "engine.param_dtype=bfloat16", "rollout.dtype=bfloat16",
        "weight_sync={transport: shared_memory, bucket_bytes: 65536}", cluster=cluster,
    )  # fmt: skip
    check_training(ended, task.model)
    assert ended.summary["stale_samples"] == 0
    assert [record["weight_version"] for record in ended.records("step")] == [1, 2, 3]


def test_two_ranks_two_workers_ahead_of_training(task: Task, tmp_path: Path, cluster: Cluster) -> None:
    ended = run(
        "train", task.train, tmp_path / "out", "trainer.num_ranks=2", "rollout.num_workers=2", "trainer.num_steps=4",
        "async_training={staleness_threshold: 1, partial_rollout: true, trigger_parameter_sync_step: 2}",
        "algorithm.old_log_probs=recompute", "weight_sync={transport: object_store, bucket_bytes: 65536}",
        evaluation(task), cluster=cluster,
    )  # fmt: skip
    check_training(ended, task.model)
    check_results(ended, 4, {"trainer", "rollouter-0", "rollouter-1", "scoring", "evaluation"})
    assert all(record["staleness_max"] <= 2 for record in ended.records("step"))
    assert all(math.isfinite(record["importance_weight"]) for record in ended.records("step"))
    assert [record["weight_version"] for record in ended.records("step")] == [0, 1, 1, 2]


@pytest.mark.nightly
def test_an_epoch_of_two_files_scored_by_two_rewards_one_of_which_fails(
    task: Task, tmp_path: Path, cluster: Cluster
) -> None:
    folder = task.model.parent
    rewards = "{function: tests.end_to_end_rewards.count_even}, {function: tests.end_to_end_rewards:Judge, weight: 0.5,"
    settings = (
        f"data.prompts=[{{path: {folder}/prompts.jsonl, weight: 3}}, {{path: {folder}/held_out.jsonl, weight: 1}}]",
        "trainer.num_steps=null", "trainer.num_epochs=1", "engine.lr_schedule=cosine",
        "reward.function=null", f"reward.functions=[{rewards} config: {{bonus: 2.0}}}}]",
        "reward.on_error=drop", "reward.timeout_s=2",
    )  # fmt: skip
    with Job("train", task.train, tmp_path / "out", settings, cluster) as job:  # the warnings are on standard error
        ended = job.wait()
    assert ended.code == 0, ended.stderr
    check_training(ended, task.model)
    assert ended.summary["num_steps"] == 8  # of four prompts: the smaller file's eight are a quarter
    steps = ended.records("step")
    assert [sum(step.get(f"scoring/{name}", 0) for step in steps) for name in ("errors", "dropped_samples")] == [2, 2]
    assert all(record["reward/Judge/score"] <= 2.0 and record["reward/Judge/length"] > 0 for record in steps)
    assert steps[0]["learning_rate"] > steps[-1]["learning_rate"]
    failed, stuck = sorted(ended.summary["warnings"], key=lambda text: "is stuck" in text)
    assert "is stuck: no score after reward.timeout_s=2 seconds" in stuck
    assert "gave null" in failed
    assert all(" of data.prompts[" in text for text in (stuck, failed))


def evaluation(task: Task) -> str:
    """The setting that asks for one."""
    sums = f"{{prompts: {task.model.parent}/held_out.jsonl, num_prompts: 8, num_samples: 2}}"
    return f"evaluation={{sets: {{sums: {sums}}}}}"


def check_results(ended: Ended, num_steps: int, processes: set[str]) -> None:
    """Check that all files are there, and speak of the whole run."""
    assert "gradients are reduced at last_micro_batch (as configured)" in ended.stdout
    assert ended.summary.keys() >= SUMMARY_KEYS
    assert all(ended.summary[key] is not None for key in SUMMARY_KEYS)
    assert (ended.summary["status"], ended.summary["num_steps"]) == ("finished", num_steps)
    evaluations = ended.records("evaluation")
    assert [record["step"] for record in evaluations] == [0, num_steps]
    assert all(record["sums/mean@2"] <= record["sums/pass@2"] <= 1 and record["wait_s"] >= 0 for record in evaluations)
    config = yaml.safe_load((ended.output / "config.yaml").read_text(encoding="utf-8"))
    assert config["trainer"]["num_steps"] == config["engine"]["total_steps"] == num_steps
    (events,) = (ended.output / "tensorboard").iterdir()
    assert events.stat().st_size > 0
    assert "</html>" in (ended.output / "report.html").read_text(encoding="utf-8")
    assert {span["who"] for span in read_lines(ended.output / "timeline.jsonl")} == processes
    check_model_loads(ended.output / "model")


def check_training(ended: Ended, model: Path) -> None:
    """Check what every good run has: finite metrics, and other weights than before."""
    steps = ended.records("step")
    assert len(steps) == ended.summary["num_steps"] == ended.summary["num_steps_planned"]
    assert all(math.isfinite(record["loss"]) and record["grad_norm"] > 0 for record in steps)
    assert all(record["step_applied"] == 1 for record in steps)
    before, after = read_weights(model), read_weights(ended.output / "model")
    assert after.keys() == before.keys()
    assert any((after[name].float() != before[name].float()).any() for name in before)


def check_model_loads(folder: Path) -> None:
    """Have transformers load the model with its tokenizer, and continue a text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    continued = model.generate(**tokenizer("01+02=", return_tensors="pt"), max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(continued[0]).startswith("<bos>01+02=")


def read_weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
