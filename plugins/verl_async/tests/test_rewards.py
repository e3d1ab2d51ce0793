"""Reward functions: finding them, calling them, and what can go wrong."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from verl_async.data.prompts import Prompt
from verl_async.data.rewards import Result, Sample, exact_match, is_async, load_reward, read_result
from verl_async.reward_config import RewardConfig, RewardFunctionConfig
from verl_engine.contract.config_file import validate
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = Prompt(index=7, data_source="addition", prompt="1+2=", ground_truth=3, extra_info={"level": 1})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty; sys.path is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "so_that_sys_path_is_restored")
    for name in [name for name in sys.modules if name.startswith("my_")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path


def test_exact_match_compares_as_text_without_outer_space() -> None:
    assert exact_match("a", " 42\n", 42, {}) == 1.0
    assert exact_match("a", "42", " 42", {}) == 1.0
    assert exact_match("a", "4 2", "42", {}) == 0.0
    assert exact_match("a", "", "42", {}) == 0.0


@pytest.mark.parametrize(
    ("result", "score"),
    [
        (0.5, 0.5),
        (2, 2.0),
        (True, 1.0),
        ({"score": 0.5, "acc": True}, 0.5),
        ({"score": False}, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(1), 1.0),
    ],
)
def test_results_that_are_scores(result: object, score: float) -> None:
    got = read_result(result)
    assert got.score == score
    assert type(got.score) is float


def test_other_numbers_of_a_mapping_are_metrics() -> None:
    got = read_result({"score": 0.5, "acc": True, "tokens": np.int64(3), "pred": "42", "steps": [1], 7: 2, "all": None})
    assert got == Result(0.5, {"acc": 1.0, "tokens": 3.0, "7": 2.0})
    assert {type(value) for value in got.metrics.values()} == {float}


@pytest.mark.parametrize(
    "result",
    [
        None,
        "1",
        float("nan"),
        float("inf"),
        1e300,
        {"score": None},
        {"acc": 1.0},
        {"score": float("nan")},
        [1],
        10**400,
    ],
)
def test_results_that_are_none(result: object) -> None:
    with pytest.raises(ValueError, match=r"^gave .*; expected a finite number of float32's range, or a mapping with"):
        read_result(result)


def test_whether_a_response_is_exact_follows_from_the_ground_truth() -> None:
    assert [Sample(PROMPT, solution, "s").is_exact for solution in ("3\n", "33")] == [True, False]


def load(function: str, **config: Any) -> Any:
    return load_reward(RewardFunctionConfig(function=function, config=config))


@pytest.mark.parametrize("name", ["my_rewards_here.score", "my_rewards_here:score", "my_rewards_here:Nested.score"])
def test_finds_a_function_in_the_current_folder(folder: Path, name: str) -> None:
    code = "def score(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.25\n"
    (folder / "my_rewards_here.py").write_text(f"{code}class Nested:\n    score = score\n", encoding="utf-8")
    assert load(name)(**Sample(PROMPT, "", "s").arguments) == 0.25


def test_finds_a_function_in_a_package(folder: Path) -> None:
    package = folder / "my_reward_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("def score(**kwargs):\n    return kwargs\n", encoding="utf-8")
    assert load("my_reward_package.inner.score")(**Sample(PROMPT, "30", "s").arguments) == {
        "data_source": "addition",
        "solution_str": "30",
        "ground_truth": 3,
        "extra_info": {"level": 1},
    }


JUDGE = """
from verl_engine.contract.strict_model import StrictModel

class Judge:
    class Config(StrictModel):
        bonus: float = 0.5
        strict: bool

    def __init__(self, config):
        if config.bonus < 0: raise ValueError("no such bonus")
        self.config = config

    async def __call__(self, data_source, solution_str, ground_truth, extra_info):
        return self.config.bonus

class Plain:
    def __call__(self, **kwargs): return 1

class Loose:
    class Config: pass

class Silent: pass
"""


def test_a_class_gets_its_validated_settings(folder: Path) -> None:
    (folder / "my_judges.py").write_text(JUDGE, encoding="utf-8")
    judge = load("my_judges:Judge", strict=True)
    assert (judge.config.bonus, judge.config.strict, is_async(judge)) == (0.5, True, True)
    assert not is_async(load("my_judges:Plain"))


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Judge", {}, "reward.config.strict is missing"),
        ("Judge", {"bonus": "1", "strictt": 1}, "reward.config.strictt is not a known key; did you mean"),
        ("Judge", {"bonus": -1, "strict": True}, "Judge: cannot be made: ValueError: no such bonus"),
        ("Plain", {"bonus": 1}, "reward.config={'bonus': 1}: reward.function=my_judges:Plain takes no settings"),
        ("Loose", {}, "reward.function=my_judges:Loose: its Config is no StrictModel"),
        ("Silent", {}, "reward.function=my_judges:Silent: its objects cannot be called; expected a function (data_"),
    ],
)
def test_settings_that_a_class_does_not_take(folder: Path, name: str, config: dict[str, Any], message: str) -> None:
    (folder / "my_judges.py").write_text(JUDGE, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(f"my_judges:{name}", **config)


@pytest.mark.parametrize(
    "path", ["exact_mach", "my rewards.score", ":score", ".score", "rewards.", "rewards:", "a:b:c"]
)
def test_a_name_that_is_no_path(path: str) -> None:
    with pytest.raises(ConfigError, match=r"function='.*': must be exact_match, or module:attribute or a dotted"):
        validate(RewardConfig, {"function": path}, "reward")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"function": "a.b", "functions": [{}]}, "function and config say what functions says of several"),
        ({"config": {"x": 1}}, "exact_match takes no settings"),
        ({"functions": [{"config": {"x": 1}}]}, "exact_match takes no settings"),
        ({"functions": [{"function": "a.score"}, {"function": "b:score"}]}, "'score' stands for several"),
        ({"functions": [{"data_sources": []}]}, r"reward.functions\[0\].data_sources"),
        ({"functions": [{"weight": 1e7}]}, r"reward.functions\[0\].weight=10000000.0: must be less"),
        ({"on_error": "ignore"}, "'stop', 'zero' or 'drop'"),
    ],
)
def test_rewards_at_odds_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(RewardConfig, section, "reward")


def test_a_module_that_is_not_there(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"reward.function=no_such_rewards.score: module .* cannot be imported"
    ) as caught:
        load("no_such_rewards.score")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert str(folder) in str(caught.value)


def test_a_module_that_fails(folder: Path) -> None:
    (folder / "my_failing_rewards.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be imported .ZeroDivisionError: division by zero") as caught:
        load("my_failing_rewards.score")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("other = 1", "has no function 'score'"),
        ("score = 1", "has no function 'score'"),
        (
            "def score(solution_str, ground_truth): pass",
            "takes (solution_str, ground_truth) (got an unexpected keyword",
        ),
        (
            "def score(data_source, solution_str, ground_truth, extra_info, more): pass",
            "missing a required argument: 'more'",
        ),
    ],
)
def test_what_is_no_reward_function(folder: Path, request: pytest.FixtureRequest, code: str, message: str) -> None:
    name = f"my_rewards_{abs(hash(request.node.name))}"
    (folder / f"{name}.py").write_text(code + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load(f"{name}.score")
    assert str(caught.value).startswith(f"reward.function={name}.score: ")
