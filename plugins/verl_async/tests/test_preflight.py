from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_async.tests.job_files import (
    sft_settings,
    train_settings,
    write_backend,
    write_lines,
    write_prompts,
    write_recipe,
    write_safetensors,
)
from verl_async import machine
from verl_async.errors import DataError, RewardError
from verl_async.job import load_sft_job, load_train_job
from verl_async.model_folder import check_model_folder
from verl_async.preflight import check_sft_job, check_train_job
from verl_engine.contract.errors import ConfigError, EngineError, ModelError, UnknownPluginError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Check = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the toy backend, reward functions in the current folder, and 1 GiB of shared memory."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(write_backend(tmp_path / "site")), *sys.path])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 2**30)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Check an RL job in tmp_path with some settings changed."""
    recipe = write_recipe(tmp_path / "recipe.yaml", train_settings(tmp_path))

    def run(*overrides: str, output: Path | None = None) -> list[str]:
        return check_train_job(load_train_job(recipe, overrides), output)

    return run


def _refused(check: Check, error: type[EngineError], *overrides: str, **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        check(*overrides, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_sound_job_passes_without_a_remark(check: Check, tmp_path: Path) -> None:
    assert check(output=tmp_path / "new" / "output") == []
    assert not (tmp_path / "new").exists()


def test_a_sound_sft_job_passes(tmp_path: Path) -> None:
    job = load_sft_job(write_recipe(tmp_path / "recipe.yaml", sft_settings(tmp_path)))
    assert check_sft_job(job, tmp_path / "output") == []


def test_fewer_rows_than_a_step_takes_are_a_remark(check: Check, tmp_path: Path) -> None:
    assert (
        "holds 4 prompts, fewer than the 6" in check("trainer.mini_batch_size=3", "async_training.require_batches=2")[0]
    )
    job = load_sft_job(write_recipe(tmp_path / "sft.yaml", sft_settings(tmp_path / "sft")), ["trainer.batch_size=8"])
    assert "holds 4 examples, fewer than the 8" in check_sft_job(job, None)[0]


def test_a_schedule_that_ends_before_the_job_is_a_remark(check: Check) -> None:
    (warning,) = check("engine.lr_schedule=cosine", "engine.total_steps=2", "engine.min_lr_ratio=0.5")
    assert warning.startswith("engine.total_steps=2 is below the 3 optimizer steps of the job")
    assert "stays at 5e-05; set engine.total_steps=null" in warning
    for fitting in ("engine.total_steps=3", "engine.total_steps=null", "engine.total_steps=9"):
        assert check("engine.lr_schedule=cosine", fitting) == []
    assert check("engine.total_steps=2") == []


def test_an_output_that_is_in_use_is_refused(check: Check, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").touch()
    assert "thesis.txt" in _refused(check, ConfigError, output=tmp_path / "used")


def test_an_output_that_holds_the_model_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", train_settings(tmp_path))
    (tmp_path / "old").mkdir()
    (tmp_path / "model").rename(tmp_path / "old" / "model")
    job = load_train_job(recipe, [f"model.path={tmp_path / 'old' / 'model'}"])
    with pytest.raises(ConfigError, match="this job reads"):
        check_train_job(job, tmp_path / "old", overwrite=True)


def test_a_port_in_use_is_refused(check: Check) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        message = _refused(check, ConfigError, f"trainer.master_port={port}")
        assert message.startswith(f"trainer.master_port={port} is in use on this machine")
        # Elsewhere the trainer's first rank may run on another machine.
        assert check(f"trainer.master_port={port}", "ray.address=10.0.0.1:6379") == []
    assert check(f"trainer.master_port={port}") == []


def test_an_unknown_rollout_engine_names_the_closest(check: Check) -> None:
    message = _refused(check, UnknownPluginError, "rollout.backend=embeded")
    assert "rollout.backend='embeded'" in message
    assert "did you mean embedded?" in message


def test_full_shared_memory_is_refused(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    # 14 weights of 4 bytes: a bucket holds no more than the model, 56 bytes.
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 111)
    needed = 2 * 56 + 2**28
    message = _refused(check, ConfigError)
    assert f"has 111 bytes free, but the job needs {needed}: 112 for two weight buckets" in message
    assert "ray.object_store_bytes" in message
    assert "--shm-size=1g" in message


def test_shared_memory_for_the_buckets_alone_is_a_remark(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 112)
    (warning,) = check()
    assert "Ray keeps it in /tmp" in warning
    _refused(check, ConfigError, "ray.object_store_bytes=20000000000")
    assert check("ray.address=10.0.0.1:6379") == []


def test_a_bucket_holds_the_largest_tensor(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "model" / "model.safetensors", {"large": [1000], "small": [10]})
    monkeypatch.setattr(machine, "free_shared_memory", lambda: 7999)
    assert ": 8000 for two" in _refused(check, ConfigError, "weight_sync.bucket_bytes=1024")
    assert check("weight_sync.bucket_bytes=1024", "rollout.dtype=bfloat16", "ray.address=x") == []


def test_a_missing_prompt_file_is_refused(check: Check) -> None:
    assert "data.prompts=/nowhere.jsonl: no such file" in _refused(check, DataError, "data.prompts=/nowhere.jsonl")


def test_each_of_several_files_is_checked(check: Check, tmp_path: Path) -> None:
    extra = write_lines(tmp_path / "extra.jsonl", [{"data_source": "sums", "prompt": "1"}])
    files = f"data.prompts=[{{path: {tmp_path / 'prompts.jsonl'}}}, {{path: {extra}}}]"
    message = _refused(check, DataError, files)
    assert message.startswith(f"data.prompts[1]={extra}, line 1: no column 'reward_model'")
    write_prompts(extra, 2)
    assert check(files, "trainer.mini_batch_size=6") == []
    (warning,) = check(files, "trainer.mini_batch_size=7")
    assert warning.startswith("data.prompts holds 6 prompts, fewer than the 7 of one training step")


def test_arguments_for_a_chat_template_need_a_chat(check: Check, tmp_path: Path) -> None:
    message = _refused(check, ConfigError, "data.chat_template={think: true}")
    assert message.startswith("data.chat_template={'think': True}: no prompt of data.prompts is a chat; leave it out")
    recipe = write_recipe(tmp_path / "sft.yaml", sft_settings(tmp_path / "sft"))
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    write_lines(tmp_path / "sft" / "examples.jsonl", [{"messages": turns}] * 4)
    assert check_sft_job(load_sft_job(recipe, ["data.chat_template={think: true}"]), None) == []


def test_an_empty_evaluation_file_is_refused(check: Check, tmp_path: Path) -> None:
    (tmp_path / "held_out.jsonl").write_text("")
    assert "evaluation.sets.sums.prompts=" in _refused(check, DataError)


def test_a_malformed_last_line_is_refused(check: Check, tmp_path: Path) -> None:
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write('{"data_source": "sums"\n')
    assert "line 5: not valid JSON" in _refused(check, DataError)


def test_a_malformed_example_is_refused(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", sft_settings(tmp_path))
    write_lines(tmp_path / "examples.jsonl", [{"prompt": "1+1=", "response": 2}])
    with pytest.raises(DataError, match=r"data\.examples=.*line 1: response is 2"):
        check_sft_job(load_sft_job(recipe), None)


def test_a_reward_function_that_cannot_be_imported_is_refused(check: Check) -> None:
    message = _refused(check, ConfigError, "reward.function=no_such_module.score")
    assert message.startswith("reward.function=no_such_module.score: module no_such_module cannot be imported")


def test_a_reward_function_is_tried_on_each_data_source(check: Check, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert solution_str == ground_truth\n"
        "    return {'sums': 1.0}[data_source]\n"
    )
    assert check("reward.function=picky.score") == []
    row = {"data_source": "products", "prompt": "2*3=", "reward_model": {"ground_truth": "6"}}
    write_lines(tmp_path / "held_out.jsonl", [row])
    message = _refused(check, RewardError, "reward.function=picky.score")
    assert "sample 0 of products, tried before the start" in message
    assert "KeyError" in message


def test_what_fails_before_the_start_is_a_remark_where_it_does_not_stop_the_job(check: Check, tmp_path: Path) -> None:
    (tmp_path / "none.py").write_text("def score(**_): pass\n")
    (warning,) = check("reward.function=none:score", "reward.on_error=drop")
    assert "sample 0 of sums, tried before the start (prompt row 0) gave null" in warning


def test_each_data_source_needs_a_reward_and_the_other_way_round(check: Check) -> None:
    assert check("reward.functions=[{data_sources: [sums]}]") == []
    (warning,) = check("reward.functions=[{}, {name: more, data_sources: [sums, products]}]")
    assert warning == "reward.functions[1].data_sources: no prompt has the data_source 'products'"
    message = _refused(check, ConfigError, "reward.functions=[{data_sources: [products]}]")
    assert message.startswith("reward.functions: none scores prompts of data_source 'sums'; add it to the data_sources")


def test_settings_of_a_users_class_are_checked_before_the_start(check: Check, tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(
        "from verl_engine.contract.strict_model import StrictModel\n"
        "class Judge:\n    class Config(StrictModel):\n        bonus: float = 1.0\n"
        "    def __init__(self, config): self.bonus = config.bonus\n"
        "    def __call__(self, **_): return self.bonus\n"
    )
    assert check("reward.function=judges:Judge", "reward.config.bonus=0.5") == []
    message = _refused(check, ConfigError, "reward.function=judges:Judge", "reward.config.bonus=much")
    assert message.startswith("reward.config.bonus='much': must be a valid number")


def test_the_reward_of_sft_is_tried_only_if_it_is_used(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.yaml", sft_settings(tmp_path))
    overrides = ["reward.function=no_such_module.score"]
    assert check_sft_job(load_sft_job(recipe, overrides), None) == []
    overrides.append(f"evaluation.sets.sums.prompts={write_prompts(tmp_path / 'held_out.jsonl')}")
    with pytest.raises(ConfigError, match="no_such_module"):
        check_sft_job(load_sft_job(recipe, overrides), None)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("config.json", "holds no config.json"),
        ("tokenizer.json", "holds no tokenizer"),
        ("model.safetensors", "holds no weights; expected one of model.safetensors"),
    ],
)
def test_an_incomplete_model_folder_is_refused(check: Check, tmp_path: Path, file: str, expected: str) -> None:
    (tmp_path / "model" / file).unlink()
    message = _refused(check, ModelError)
    assert message.startswith(f"model.path={tmp_path / 'model'} {expected}")


def test_a_missing_model_folder_is_refused(check: Check, tmp_path: Path) -> None:
    message = _refused(check, ModelError, "model.path=Qwen/Qwen3-0.6B")
    assert message.startswith(f"model.path={tmp_path / 'Qwen/Qwen3-0.6B'} does not exist")
    assert "hf download" in message


def test_the_parent_of_a_model_folder_is_refused_with_a_hint(check: Check, tmp_path: Path) -> None:
    message = _refused(check, ModelError, f"model.path={tmp_path}")
    assert message.endswith(f"did you mean {tmp_path / 'model'}?")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        (b"", "is not a safetensors file"),
        (b"<html>not found</html>", "is not a safetensors file"),
    ],
)
def test_weights_that_are_none_are_refused(check: Check, tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    assert expected in _refused(check, ModelError)


def test_weights_cut_short_are_refused(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    size = file.stat().st_size
    assert f"is cut short: {size} bytes of {size + 1}" in _refused(check, ModelError)


def test_weights_in_several_files_are_added_up(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    train_settings(tmp_path)
    (folder / "model.safetensors").rename(folder / "part-1.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"embedding": "part-1.safetensors", "head": "part-2.safetensors"}}')
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files, such as part-2\.safetensors"):
        check_model_folder(folder)
    write_safetensors(folder / "part-2.safetensors", {"head": [20]})
    sizes = check_model_folder(folder)
    assert (sizes.total, sizes.largest) == (34, 20)


def test_pickled_weights_are_taken(tmp_path: Path) -> None:
    train_settings(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(bytes(40))
    assert check_model_folder(tmp_path / "model").total == 20


@pytest.mark.fault(26)
def test_a_column_that_nothing_reads_is_a_remark(check: Check, tmp_path: Path) -> None:
    row = {"data_source": "sums", "prompt": "1+1=", "reward_model": {"ground_truth": "2"}, "ability": "math"}
    write_lines(tmp_path / "prompts.jsonl", [row, row, row | {"tools": [], "level": 3}, row])
    (warning,) = check()
    assert warning == f"data.prompts={tmp_path / 'prompts.jsonl'}: nothing reads the columns 'level', 'tools'"
    recipe = write_recipe(tmp_path / "sft.yaml", sft_settings(tmp_path / "sft"))
    write_lines(tmp_path / "sft" / "examples.jsonl", [{"prompt": "1+1=", "response": "2", "weight": 0.5}] * 4)
    (warning,) = check_sft_job(load_sft_job(recipe), None)
    assert warning.endswith("nothing reads the columns 'weight'")


@pytest.mark.fault(28)
def test_fewer_held_out_prompts_than_asked_for_are_a_remark(check: Check) -> None:
    (warning,) = check("evaluation.sets.sums.num_prompts=30")
    assert warning.endswith("holds 4 prompts, fewer than evaluation.sets.sums.num_prompts=30")
    assert check("evaluation.sets.sums.num_prompts=4") == []


@pytest.mark.fault(22)
def test_more_processes_than_a_machine_holds_are_refused(check: Check) -> None:
    message = _refused(check, ConfigError, "rollout.num_workers=60000")
    assert message.startswith("trainer.num_ranks=1 and rollout.num_workers=60000 are 60001 processes on this machine")
    assert check("rollout.num_workers=60000", "ray.address=10.0.0.1:6379") == []
