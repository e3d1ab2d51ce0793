from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plugins.verl_async.tests.job_files import sft_settings, train_settings, write_backend, write_recipe
from verl_async.job import load_sft_job, load_train_job, resolved, with_steps
from verl_async.report.output_folder import config_yaml
from verl_async.rollout import embedded_plugin
from verl_engine.contract.errors import ConfigError, UnknownPluginError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", autouse=True)
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = str(write_backend(tmp_path_factory.mktemp("site")))
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)
    sys.modules.pop("toy_engine_hooks", None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path / "recipe.yaml", train_settings(tmp_path))


def _message(recipe: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_train_job(recipe, overrides)
    return str(caught.value)


def test_the_backend_validates_its_own_section(recipe: Path) -> None:
    job = load_train_job(recipe, ["engine.most_ranks=2"])
    assert type(job.engine).__name__ == "ToyConfig"
    assert job.engine.model_dump()["most_ranks"] == 2


def test_total_steps_of_rl_are_steps_times_required_batches(recipe: Path) -> None:
    job = load_train_job(recipe, ["trainer.num_steps=7", "async_training.require_batches=2"])
    assert job.engine.total_steps == 14


def test_total_steps_of_sft_are_its_steps(tmp_path: Path) -> None:
    job = load_sft_job(write_recipe(tmp_path / "recipe.yaml", sft_settings(tmp_path)))
    assert job.engine.total_steps == 5


def test_total_steps_that_are_given_stay(recipe: Path) -> None:
    assert load_train_job(recipe, ["engine.total_steps=1000"]).engine.total_steps == 1000


def test_a_warm_up_longer_than_the_job_is_refused(recipe: Path) -> None:
    message = _message(recipe, "engine.warmup_steps=3")
    assert message == "engine: warmup_steps=3 must be below total_steps=3"


def test_paths_are_absolute(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(recipe.parent)
    monkeypatch.setenv("HOME", str(recipe.parent / "home"))
    job = load_train_job(Path("recipe.yaml"), ["model.path=model", "data.prompts=~/prompts.jsonl"])
    assert job.model.path == recipe.parent / "model"
    assert job.data.prompts == recipe.parent / "home" / "prompts.jsonl"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.num_stepz=3", "trainer.num_stepz is not a known key; did you mean trainer.num_steps?"),
        ("engine.learning_rat=1", "engine.learning_rat is not a known key; did you mean engine.learning_rate?"),
        ("engine=null", "engine.backend is missing"),
        ("engine=toy", "engine='toy' must be a section"),
        ("engine.learning_rate=-1", "engine.learning_rate=-1: must be greater than 0"),
        ("reward.timeout_s=1e300", "reward.timeout_s=1e+300: must be less than or equal to 100000000"),
        ("async_training.staleness_threshold=1e308", "must be less than or equal to 1000000"),
        ("trainer.num_ranks=8", "engine.most_ranks=4 is below the number of ranks, 8"),
        ("trainer.num_ranks=3", "sequences do not divide over trainer.num_ranks=3; make it a multiple of 3"),
        ("engine.head=value", "engine.head=value: a job trains a language model"),
        ("engine.forward_only=true", "engine.forward_only=true: a job trains its engine"),
        ("rollout.routed_experts=true", "rollout.routed_experts=true: with engine.router_replay=false the trainer"),
        ("engine.entropy=gradient", "engine.entropy=gradient: neither algorithm.loss=ppo nor"),
        ("algorithm.entropy_coefficient=0.1", "=0.1 needs the gradient of the entropy, and engine.entropy=off; set"),
        ("algorithm.loss=poo", "algorithm.loss='poo': must be ppo, or module:attribute or a dotted path"),
        ("algorithm.advantage=grppo", "such as my_rewards:score; did you mean grpo?"),
        ("algorithm.loss_config={clip_lo: 0.1}", "algorithm.loss_config.clip_lo is not a known key; did you mean"),
        ("algorithm.loss_config.clip_low=1", "algorithm.loss_config.clip_low=1: must be less than 1"),
        ("algorithm.advantage_config.a=1", "algorithm.advantage_config={'a': 1}: algorithm.advantage=grpo takes no se"),
        ("algorithm.loss_normalizer=words", "algorithm.loss_normalizer='words': must be"),
        ("evaluation.sets={}", "evaluation.sets: must name at least one set of prompts"),
        ("evaluation.sets={a/b: {prompts: a}}", "'a/b' is no name of a set; use letters"),
        ("evaluation.prompts=a.jsonl", "evaluation.prompts is not a known key"),
        (
            "evaluation.sets.sums={prompts: a, temperature: 0, num_samples: 4}",
            "temperature=0 takes the likeliest token",
        ),
        ("algorithm.kl.estimator=k4", "algorithm.kl.estimator='k4': must be 'k1', 'k2' or 'k3'"),
    ],
)
def test_one_fault_is_one_message(recipe: Path, override: str, expected: str) -> None:
    message = _message(recipe, override)
    assert expected in message
    assert "\n" not in message


@pytest.mark.fault(22)
@pytest.mark.parametrize(
    "setting",
    [
        "trainer.num_ranks=1000000000",
        "rollout.num_workers=1000000000",
        "rollout.n=1000000000",
        "rollout.top_k=100000000000000000000",
        "rollout.num_threads=1000000000",
        "rollout.temperature=1e-300",
        "evaluation.sets.sums.temperature=1e-300",
        "data.seed=100000000000000000000000000000",
        "trainer.mini_batch_size=1000000000",
        "trainer.num_steps=100000000000",
        "weight_sync.bucket_bytes=10000000000000000000",
        "async_training.queue_size=100000000000",
    ],
)
def test_numbers_have_upper_bounds(recipe: Path, setting: str) -> None:
    message = _message(recipe, setting)
    assert message.startswith(setting.partition("=")[0] + "=")
    assert "must be" in message
    assert "\n" not in message


@pytest.mark.fault(24)
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("model.path=~nosuchuser/model", "model.path='~nosuchuser/model': there is no such user"),
        (f"data.prompts={'x' * 300}", "too long; a name may have 255 bytes"),
        (f"data.prompts={'x/' * 3000}", "and a whole path 4095"),
        ('evaluation.sets.sums.prompts="a\\0b"', "cannot hold the character NUL"),
        ('model.path=""', "model.path='': must not be empty"),
        ("model.path=0", "must be a text that names a file or folder"),
    ],
)
def test_a_path_that_cannot_be_is_named(recipe: Path, setting: str, expected: str) -> None:
    message = _message(recipe, setting)
    assert message.startswith(setting.partition("=")[0] + "=")
    assert expected in message


@pytest.mark.fault(24)
@pytest.mark.parametrize("name", ["a${b}", "a\\${b", "off", "1e5", "a\u2028 b", "?", "#x", " x"])
def test_a_path_of_any_characters_loads_again(recipe: Path, name: str) -> None:
    job = load_train_job(recipe)
    job = job.model_copy(update={"model": job.model.model_copy(update={"path": Path("/models") / name})})
    again = recipe.with_name("config.yaml")
    again.write_text(config_yaml(resolved(job)), encoding="utf-8")
    assert load_train_job(again) == job


def test_sequences_divide_over_data_parallel_ranks_and_not_over_all(recipe: Path, tmp_path: Path) -> None:
    settings = ["trainer.num_ranks=4", "trainer.mini_batch_size=1", "engine.ranks_per_replica=2"]
    job = load_train_job(recipe, [*settings, "rollout.n=6"])  # six sequences, two data-parallel ranks, four ranks
    assert job.engine.data_parallel_ranks(job.trainer.num_ranks) == (0, 0, 1, 1)
    expected = (
        "trainer.mini_batch_size * rollout.n = 5 sequences do not divide over the 2 data-parallel ranks of "
        "trainer.num_ranks=4; make it a multiple of 2"
    )
    assert _message(recipe, *settings, "rollout.n=5") == expected
    supervised = write_recipe(tmp_path / "sft.yaml", sft_settings(tmp_path / "sft"))
    with pytest.raises(ConfigError, match=r"trainer.batch_size=3 sequences do not divide over trainer.num_ranks=2"):
        load_sft_job(supervised, ["trainer.batch_size=3", "trainer.num_ranks=2"])


def test_what_no_job_can_use_is_refused_at_once_for_both_kinds(recipe: Path, tmp_path: Path) -> None:
    unusable = ["engine.head=value", "engine.forward_only=true"]
    heading, *problems = _message(recipe, *unusable).splitlines()
    assert heading == "2 problems in the configuration:"
    assert [problem.split(":")[0].strip() for problem in problems] == unusable
    supervised = write_recipe(tmp_path / "sft.yaml", sft_settings(tmp_path / "sft"))
    with pytest.raises(ConfigError, match=r"engine\.head=value: .*; use language_model"):
        load_sft_job(supervised, ["engine.head=value"])
    with pytest.raises(ConfigError, match=r"engine\.entropy=value: the loss of a supervised job takes no entropy"):
        load_sft_job(supervised, ["engine.entropy=value"])


def test_weights_of_a_sync_are_kept_aside_only_by_a_backend_with_snapshots(recipe: Path) -> None:
    recompute = "algorithm.old_log_probs=recompute"
    for overrides in ([recompute], ["async_training.trigger_parameter_sync_step=2"]):
        load_train_job(recipe, overrides)
    with pytest.raises(
        UnsupportedError, match=r"recompute with .*sync_step=2 keeps .* cannot do 'snapshots': a toy; use"
    ):
        load_train_job(recipe, [recompute, "async_training.trigger_parameter_sync_step=2"])


def test_what_the_backend_cannot_do_is_refused_before_anything_starts(recipe: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"engine\.backend=toy cannot do 'lora': a toy"):
        load_train_job(recipe, ["engine.lora.rank=4"])


def test_an_unknown_backend_names_the_closest(recipe: Path) -> None:
    with pytest.raises(UnknownPluginError, match=r"engine\.backend='toi'.*did you mean toy"):
        load_train_job(recipe, ["engine.backend=toi"])


def test_faults_of_all_sections_come_together(recipe: Path) -> None:
    message = _message(recipe, "engine.eps=0", "trainer.num_steps=0", "rollout.m=3")
    heading, *problems = message.splitlines()
    assert heading == "3 problems in the configuration:"
    assert [problem.split("=")[0].split()[0] for problem in problems] == [
        "engine.eps",
        "rollout.m",
        "trainer.num_steps",
    ]


def test_an_unknown_backend_does_not_hide_other_faults(recipe: Path) -> None:
    message = _message(recipe, "engine.backend=toi", "trainer.num_steps=0")
    assert "engine.backend='toi'" in message
    assert "trainer.num_steps=0" in message


def test_a_faulty_length_is_not_blamed_on_the_engine(recipe: Path) -> None:
    message = _message(recipe, "trainer.num_steps=0", "engine.warmup_steps=100")
    assert "warmup_steps" not in message


_OVERRIDES = st.fixed_dictionaries(
    {},
    optional={
        "engine.learning_rate": st.floats(min_value=1e-12, max_value=1.0),
        "engine.betas": st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)).map(list),
        "trainer.num_steps": st.integers(1, 10**9),
        "trainer.master_port": st.none() | st.integers(1024, 65535),
        "async_training.staleness_threshold": st.floats(min_value=0, max_value=10),
        "async_training.partial_rollout": st.booleans(),
        "reward.function": st.sampled_from(["exact_match", "a.b", "a.b:c.d", None]),
        "reward.functions": st.just([]) | st.just([{"weight": 0.5, "data_sources": ["$"]}, {"function": "a:b"}]),
        "rollout.max_running": st.integers(1, 2**16),  # of the embedded engine alone
        "data.prompts": st.text(alphabet="abä /#:-'", min_size=1),
        "evaluation.sets.sums.stop_at_exact_match": st.none() | st.floats(0.001, 1.0),
    },
)


@given(overrides=_OVERRIDES)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_resolved_job_loads_as_an_equal_job(overrides: dict[str, Any], recipe: Path) -> None:
    if overrides.get("reward.functions"):
        overrides.pop("reward.function", None)
    job = load_train_job(recipe, [f"{key}={json.dumps(value)}" for key, value in overrides.items()])
    config = write_recipe(recipe.with_name("config.yaml"), resolved(job))
    assert load_train_job(config) == job


def test_a_resolved_sft_job_loads_as_an_equal_job(tmp_path: Path) -> None:
    job = load_sft_job(write_recipe(tmp_path / "recipe.yaml", sft_settings(tmp_path)))
    assert load_sft_job(write_recipe(tmp_path / "config.yaml", resolved(job))) == job


def test_epochs_are_counted_in_steps_when_the_rows_are_read(recipe: Path, tmp_path: Path) -> None:
    settings = ["trainer.num_steps=null", "trainer.num_epochs=3", "async_training.require_batches=2"]
    job = load_train_job(recipe, settings)
    assert (job.trainer.num_steps, job.engine.total_steps, job.optimizer_steps) == (None, None, None)
    assert load_train_job(write_recipe(recipe.with_name("config.yaml"), resolved(job))) == job
    counted = with_steps(job, 10)  # 30 prompts, 4 a step
    assert (counted.trainer.steps, counted.engine.total_steps) == (8, 16)
    assert with_steps(counted, 99) is counted
    given = with_steps(load_train_job(recipe, [*settings, "engine.total_steps=5"]), 10)
    assert (given.trainer.steps, given.engine.total_steps) == (8, 5)
    late = load_train_job(recipe, [*settings, "engine.warmup_steps=16"])
    with pytest.raises(ConfigError, match="warmup_steps=16 must be below total_steps=16"):
        with_steps(late, 10)
    sft = write_recipe(tmp_path / "sft.yaml", sft_settings(tmp_path / "sft"))
    supervised = with_steps(load_sft_job(sft, settings[:2]), 10)
    assert (supervised.trainer.steps, supervised.engine.total_steps) == (8, 8)


def test_a_job_has_steps_or_epochs(recipe: Path) -> None:
    assert "trainer: num_steps=3, num_epochs=2: give one of them" in _message(recipe, "trainer.num_epochs=2")
    assert "num_steps=null, num_epochs=null: give one of them" in _message(recipe, "trainer.num_steps=null")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("data.prompts=[]", "data.prompts=[]: must be a file, or a list with at least one"),
        ("data.prompts=[{path: a.jsonl, weight: 1}, {path: b.jsonl}]", "the file at index 1 has no weight"),
        ("data.prompts=[{path: a.jsonl, weight: 1e-30}]", "must be greater than or equal to 0.000001"),
        (
            "data.prompts=[{path: a.jsonl, weight: 0}]",
            "data.prompts[0].weight=0: must be greater than or equal to 0.000001",
        ),
        ("data.prompts=[{file: a.jsonl}]", "data.prompts[0].path is missing"),
        ("data.overlong=cut", "data.overlong='cut': must be 'error' or 'drop'"),
        ("data.chat_template={tokenize: true}", "'tokenize' is set by the job itself; leave it out"),
        ("data.chat_template={tools: [search]}", "tools must be a list of mappings"),
    ],
)
def test_data_settings_that_are_refused(recipe: Path, setting: str, message: str) -> None:
    assert message in _message(recipe, setting)


def test_paths_of_several_files_are_absolute(recipe: Path) -> None:
    job = load_train_job(recipe, ["data.prompts=[{path: a.jsonl}, {path: ~/b.jsonl}]"])
    assert not isinstance(job.data.prompts, Path)
    assert [file.path for file in job.data.prompts] == [Path.cwd() / "a.jsonl", Path.home() / "b.jsonl"]
    assert load_train_job(write_recipe(recipe.with_name("config.yaml"), resolved(job))) == job


def test_deterministic_mode_is_on_policy_and_needs_an_engine_that_can(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_policy = ("rollout.deterministic=true", "async_training={staleness_threshold: 0}")
    assert load_train_job(recipe, on_policy).rollout.deterministic
    for ahead in ("staleness_threshold: 0.5", "staleness_threshold: 0, trigger_parameter_sync_step: 2"):
        message = _message(recipe, "rollout.deterministic=true", f"async_training={{{ahead}}}")
        assert "rollout.deterministic=true needs async_training.staleness_threshold=0 and" in message
    lacking = dataclasses.replace(embedded_plugin.SPEC, gaps={"sealed": "requests of others always run beside"})
    monkeypatch.setattr(embedded_plugin, "SPEC", lacking)
    with pytest.raises(UnsupportedError, match="cannot do 'sealed': requests of others"):
        load_train_job(recipe, on_policy)
    assert load_train_job(recipe, ["rollout.top_k=3"]).rollout.top_k == 3


def test_a_job_that_replays_experts_has_its_rollouts_say_them(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_train_job(recipe, ["engine.router_replay=true"])
    assert job.rollout.routed_experts
    again = write_recipe(tmp_path / "again.yaml", resolved(job))
    assert load_train_job(again) == job
    assert not load_train_job(recipe).rollout.routed_experts
    lacking = dataclasses.replace(embedded_plugin.SPEC, gaps={"routes": "the library does not tell"})
    monkeypatch.setattr(embedded_plugin, "SPEC", lacking)
    with pytest.raises(UnsupportedError) as caught:
        load_train_job(recipe, ["engine.router_replay=true"])
    assert str(caught.value) == (
        "engine.router_replay=true: rollout.backend=embedded cannot do 'routes': the library does not tell"
    )
    supervised = write_recipe(tmp_path / "sft.yaml", sft_settings(tmp_path / "sft"))
    with pytest.raises(ConfigError, match="router_replay=true: the examples of a supervised job say no experts; use"):
        load_sft_job(supervised, ["engine.router_replay=true"])
