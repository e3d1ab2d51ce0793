"""The recipes that a user starts from are valid, and so is the data that they are made for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from recipes import addition_data, chain_sum_data
from recipes.chain_sum_check import read_losses
from recipes.chain_sum_reward import score
from tests.repository import ROOT, run_python
from verl_async.data.examples import read_examples
from verl_async.data.prompts import read_prompts

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addition")
    made = run_python("recipes/addition_data.py", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "verl_engine", *arguments, "--dry-run", PYTHONPATH=str(ROOT / "recipes"))


def test_addition_sft_is_valid(addition: Path, tmp_path: Path) -> None:
    done = dry_run(
        "sft", "recipes/addition_sft.yaml", f"model.path={addition}/model", f"data.examples={addition}/sft.parquet",
        f"evaluation.prompts={addition}/eval.jsonl", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()


def test_addition_grpo_is_valid(addition: Path, tmp_path: Path) -> None:
    done = dry_run(
        "train", "recipes/addition_grpo.yaml", f"model.path={addition}/model", f"data.prompts={addition}/train.parquet",
        f"evaluation.prompts={addition}/eval.jsonl", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_chain_sum_grpo_is_valid(addition: Path, tmp_path: Path) -> None:
    row = chain_sum_data.prompt_row(0, "What is 1 + 1?", "2")
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(row)] * 8), encoding="utf-8")
    done = dry_run(
        "train", "recipes/chain_sum_grpo.yaml", f"model.path={addition}/model",
        f"data.prompts={tmp_path}/train.jsonl", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_megatron_needs_another_engine_section_and_nothing_else(addition: Path, tmp_path: Path) -> None:
    ours, megatron = (
        yaml.safe_load((ROOT / "recipes" / name).read_text(encoding="utf-8"))
        for name in ("addition_grpo.yaml", "addition_grpo_megatron.yaml")
    )
    assert (ours.pop("engine")["backend"], megatron.pop("engine")["backend"]) == ("fsdp2", "megatron")
    assert megatron == ours
    done = dry_run(
        "train", "recipes/addition_grpo_megatron.yaml", f"model.path={addition}/model",
        f"data.prompts={addition}/train.parquet", f"evaluation.prompts={addition}/eval.jsonl",
        "trainer.num_ranks=2", "engine.pipeline_parallel_size=2", "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("npu_qwen3_vl_30b.yaml", ()),
        ("npu_qwen3_vl_30b.yaml", ("trainer.num_ranks=12", "engine.expert_parallel_size=4")),
        ("npu_qwen3_vl_30b.yaml", ("engine.expert_parallel_size=1",)),
        ("npu_qwen3_235b.yaml", ()),
    ],
)
def test_recipes_for_npus_are_valid(recipe: str, settings: tuple[str, ...], addition: Path, tmp_path: Path) -> None:
    # Every setting and every size that such a recipe names, its own or one that its comments recommend.
    row = chain_sum_data.prompt_row(0, "What is 1 + 1?", "2")
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps(row)] * 64), encoding="utf-8")
    done = dry_run(
        "train", f"recipes/{recipe}", f"model.path={addition}/model", f"data.prompts={tmp_path}/train.jsonl",
        *settings, "--output", str(tmp_path / "out"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["engine"]["device"] == "npu"


def test_no_held_out_sum_is_trained_on(addition: Path) -> None:
    held_out = {str(prompt.prompt) for prompt in read_prompts(addition / "eval.jsonl", "evaluation.prompts")}
    trained = {str(prompt.prompt) for prompt in read_prompts(addition / "train.parquet", "data.prompts")}
    examples = {str(example.prompt) for example in read_examples(addition / "sft.parquet", "data.examples")}
    assert len(held_out) == addition_data.NUM_HELD_OUT
    assert held_out.isdisjoint(trained)
    assert examples == trained
    assert len(held_out | trained) == 10_000


def test_sums_are_written_back_to_front() -> None:
    assert addition_data.prompt_row(7, 85)["prompt"] == "07+85="
    assert addition_data.prompt_row(7, 85)["reward_model"]["ground_truth"] == "29"
    assert addition_data.example_row(47, 85) == {"prompt": "47+85=", "response": "231"}


def test_a_seed_gives_one_split() -> None:
    assert addition_data.split_sums(3) == addition_data.split_sums(3)
    assert addition_data.split_sums(3) != addition_data.split_sums(4)


def test_the_tokenizer_goes_there_and_back(addition: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(addition / "model")
    token_ids = tokenizer("47+85=")["input_ids"]
    assert token_ids[0] == tokenizer.bos_token_id
    assert len(token_ids) == 7
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == "47+85="


@pytest.mark.parametrize(
    ("solution", "reward"),
    [("The answer is 12.", 1.0), ("5 + 7 = 12", 1.0), ("12 - 1 = 11", 0.1), ("-12", 0.1), ("", 0.0)],
)
def test_chain_sum_reward(solution: str, reward: float) -> None:
    assert score("reasoning_gym/chain_sum", solution, "12", {}) == reward


def test_losses_are_read_from_steps_only(tmp_path: Path) -> None:
    lines = ['{"kind": "evaluation", "step": 0}', '{"kind": "step", "loss": 0.5}', '{"kind": "step", "loss": null}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    first, second = read_losses(tmp_path / "metrics.jsonl")
    assert first == 0.5
    assert second != second  # noqa: PLR0124 - nan
