"""The jobs that a user starts from, in examples/ and recipes/, are valid, and so is the data they are made for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from examples import addition_data, chain_sum_data
from examples.calculator import solved
from examples.chain_sum_check import read_losses
from examples.chain_sum_reward import score
from tests.repository import ROOT, run_python
from verl_async.data.examples import Example, read_examples
from verl_async.data.prompts import read_prompts

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path


SMOKE: Final = (
    "trainer.mini_batch_size=4",
    "trainer.num_steps=1",
    "engine.warmup_steps=0",
    "rollout.n=2",
    "rollout.max_response_tokens=64",
)
"""One step, as the headers of the recipes have it."""


@pytest.fixture(scope="module")
def addition(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("addition")
    made = run_python("examples/addition_data.py", str(folder))
    assert made.returncode == 0, made.stderr
    return folder


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "verl_engine", *arguments, "--dry-run", PYTHONPATH=str(ROOT / "examples"))


@pytest.fixture(scope="module")
def inputs(addition: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Make what the jobs read in place of their own: a small model, and few rows."""
    row = chain_sum_data.prompt_row(0, "What is 1 + 1?", "2")
    prompts = tmp_path_factory.mktemp("prompts") / "train.jsonl"
    prompts.write_text("\n".join([json.dumps(row)] * 64), encoding="utf-8")
    return {
        "model.path": f"{addition}/model",
        "data.prompts": str(prompts),
        "data.examples": f"{addition}/sft.parquet",
        "evaluation.sets.sums.prompts": f"{addition}/eval.jsonl",
    }


VARIANTS: Final[dict[str, tuple[tuple[str, ...], ...]]] = {
    "examples/addition_grpo_megatron.yaml": (("trainer.num_ranks=2", "engine.pipeline_parallel_size=2"),),
    "recipes/npu_qwen3_vl_30b.yaml": (
        ("trainer.num_ranks=12", "engine.expert_parallel_size=4"),
        ("engine.expert_parallel_size=1", "engine.expert_tensor_parallel_size=null"),
    ),
    "recipes/qwen3_5_2b_fsdp_turbo.yaml": (SMOKE, ("trainer.num_ranks=8",)),
    "recipes/qwen3_5_27b_fsdp_turbo.yaml": (("trainer.mini_batch_size=8", *SMOKE[1:]),),
    "recipes/qwen3_5_35b_a3b_fsdp_turbo.yaml": (
        ("trainer.mini_batch_size=8", *SMOKE[1:]),
        ("engine.ep_plan.dispatcher=fused",),
    ),
}
"""By job the settings that its header or a page recommends besides its own."""
JOBS: Final = [
    f"{folder}/{path.name}" for folder in ("examples", "recipes") for path in sorted((ROOT / folder).glob("*.yaml"))
]
CASES: Final = [(job, settings) for job in JOBS for settings in ((), *VARIANTS.get(job, ()))]


@pytest.mark.parametrize(("recipe", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_every_job_is_valid(recipe: str, settings: tuple[str, ...], inputs: dict[str, str], tmp_path: Path) -> None:
    done = try_recipe(recipe, settings, inputs, tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out").exists()


def try_recipe(
    recipe: str, settings: tuple[str, ...], inputs: dict[str, str], tmp_path: Path
) -> subprocess.CompletedProcess[str]:
    """Check a recipe, with the inputs that it asks for in place of its own."""
    job = yaml.safe_load((ROOT / recipe).read_text(encoding="utf-8"))
    named = [key for key in inputs if key.split(".")[1] in job.get(key.split(".")[0], {})]
    command = "sft" if "data.examples" in named else "train"
    paths = [f"{key}={inputs[key]}" for key in named]
    return dry_run(command, recipe, *paths, *settings, "--output", str(tmp_path / "out"))


@pytest.mark.parametrize("job", JOBS)
def test_a_header_says_what_was_run_where_and_what_was_not(job: str) -> None:
    lines = (ROOT / job).read_text(encoding="utf-8").splitlines()
    header = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    said = [word for word in ("# Run: ", "# Not run: ") if any(line.startswith(word) for line in header)]
    assert said == (["# Run: "] if job.startswith("examples/") else ["# Run: ", "# Not run: "])


def handed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Read what a dry run says that the engine hands to its framework."""
    _, _, notes = done.stdout.partition("What backend fsdp_turbo hands to its framework on ")
    values: dict[str, Any] = yaml.safe_load("\n".join(line.removeprefix("# ") for line in notes.splitlines()[1:]))
    return values


def test_qwen3_5_2b_shares_weights_among_four_ranks_and_sequences_among_two(
    inputs: dict[str, str], tmp_path: Path
) -> None:
    told = handed(try_recipe("recipes/qwen3_5_2b_fsdp_turbo.yaml", (), inputs, tmp_path))
    sizes = told["distributed"]
    assert (sizes["fully_shard_parallel_size"], sizes["ulysses_parallel_size"]) == (4, 2)
    modeling = "transformers.models.qwen3_5.modeling_qwen3_5"
    assert sizes["cp_plan"] == {
        "ulysses_function_patches": [
            {"target_functions": [f"{modeling}.eager_attention_forward"], "type": "full_attention"},
            {"target_functions": [f"{modeling}.Qwen3_5GatedDeltaNet.forward"], "type": "gated_delta_net"},
        ],
        "loss_function_patches": [],
    }
    assert told["module_patches"] == []  # the model for text never calls what the library's example replaces
    assert sizes["fsdp_plan"]["param_dtype"] == "bf16"
    assert told["memory"]["recompute"] is True


def test_qwen3_5_27b_is_sharded_over_all_ranks(inputs: dict[str, str], tmp_path: Path) -> None:
    sizes = handed(try_recipe("recipes/qwen3_5_27b_fsdp_turbo.yaml", (), inputs, tmp_path))["distributed"]
    assert (sizes["fully_shard_parallel_size"], sizes["expert_parallel_size"]) == (16, 1)
    assert sizes["fsdp_plan"]["gradient_divide_factor"] == 16.0
    assert list(sizes["fsdp_plan"]["apply_modules"]) == ["model.embed_tokens", "model.layers.{*}", "lm_head"]
    assert "ep_plan" not in sizes


def test_qwen3_5_35b_divides_gradients_of_experts_by_all_ranks(inputs: dict[str, str], tmp_path: Path) -> None:
    sizes = handed(try_recipe("recipes/qwen3_5_35b_a3b_fsdp_turbo.yaml", (), inputs, tmp_path))["distributed"]
    assert (sizes["expert_parallel_size"], sizes["expert_fully_shard_parallel_size"]) == (8, 2)
    experts = ["model.layers.{*}.mlp.experts"]
    assert sizes["ep_plan"] == {
        "apply_modules": experts,
        "apply_efsdp_modules": experts,
        "dispatcher": "eager",
        "fixed_router": False,
        "gradient_divide_factor": 16.0,
    }


def test_megatron_needs_another_engine_section_and_nothing_else() -> None:
    ours, megatron = (
        yaml.safe_load((ROOT / "examples" / name).read_text(encoding="utf-8"))
        for name in ("addition_grpo.yaml", "addition_grpo_megatron.yaml")
    )
    assert (ours.pop("engine")["backend"], megatron.pop("engine")["backend"]) == ("fsdp2", "megatron")
    assert megatron == ours


def test_no_held_out_sum_is_trained_on(addition: Path) -> None:
    held_out = {str(prompt.prompt) for prompt in read_prompts(addition / "eval.jsonl", "evaluation.sets.sums.prompts")}
    trained = {str(prompt.prompt) for prompt in read_prompts(addition / "train.parquet", "data.prompts")}
    rows = read_examples(addition / "sft.parquet", "data.examples")
    examples = {str(row.prompt) for row in rows if isinstance(row, Example)}
    assert len(held_out) == addition_data.NUM_HELD_OUT
    assert held_out.isdisjoint(trained)
    assert examples == trained
    assert len(held_out | trained) == 10_000


def test_sums_are_written_back_to_front() -> None:
    assert addition_data.prompt_row(7, 85)["prompt"] == "07+85="
    assert addition_data.prompt_row(7, 85)["reward_model"]["ground_truth"] == "29"
    assert addition_data.example_row(47, 85) == {"prompt": "47+85=", "response": "231"}


def test_the_calculator_pays_for_the_answer_and_for_the_right_call() -> None:
    call = addition_data.call_row(47, 85)["response"]
    row = addition_data.prompt_row(47, 85)
    paid = {
        text: solved("", text, row["reward_model"]["ground_truth"], row["extra_info"])
        for text in (call, "231", "132", "47+84=131")
    }
    assert paid == {"47+85=132": 1.0, "231": 1.0, "132": 0.0, "47+84=131": 0.0}


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
