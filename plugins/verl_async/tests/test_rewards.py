"""Reward functions: finding them, calling them, and what can go wrong."""

from __future__ import annotations

import pickle
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from verl_async.config import RewardConfig
from verl_async.data.prompts import Prompt
from verl_async.data.rewards import Reward, exact_match, load_reward
from verl_async.errors import RewardError
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROMPT = Prompt(index=7, data_source="addition", prompt="1+2=", ground_truth=3, extra_info={"level": 1})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, empty; sys.path is put back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "so_that_sys_path_is_restored")
    return tmp_path


def reward_of(function: Callable[..., object], timeout_s: float = 10.0) -> Reward:
    return Reward(function, "my.function", timeout_s)


def test_exact_match_compares_as_text_without_outer_space() -> None:
    assert exact_match("a", " 42\n", 42, {}) == 1.0
    assert exact_match("a", "42", " 42", {}) == 1.0
    assert exact_match("a", "4 2", "42", {}) == 0.0
    assert exact_match("a", "", "42", {}) == 0.0


def test_the_built_in_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load_reward(RewardConfig())
    monkeypatch.setattr(threading, "Thread", None)
    assert reward.score(PROMPT, "3", "s-1") == 1.0
    assert reward.score(PROMPT, "4", "s-1") == 0.0


def test_a_function_gets_verls_arguments_by_name() -> None:
    def function(**arguments: Any) -> float:
        assert arguments == {
            "data_source": "addition",
            "solution_str": "30",
            "ground_truth": 3,
            "extra_info": {"level": 1},
        }
        return 0.25

    assert reward_of(function).score(PROMPT, "30", "s-1") == 0.25


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
    got = reward_of(lambda **_: result).score(PROMPT, "3", "s-1")
    assert got == score
    assert type(got) is float


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
    with pytest.raises(RewardError) as caught:
        reward_of(lambda **_: result).score(PROMPT, "3", "step-4/sample-2")
    message = str(caught.value)
    assert message.startswith("reward.function=my.function: sample step-4/sample-2 (prompt row 7) gave ")
    assert message.endswith("expected a finite number of float32's range, or a mapping with one under 'score'")


@pytest.mark.parametrize("error", [KeyError("level"), SystemExit(3)])
def test_a_function_that_raises_is_named_with_its_sample(error: BaseException) -> None:
    def function(**_: Any) -> float:
        raise error

    with pytest.raises(
        RewardError, match=r"sample s-9 \(prompt row 7\) raised (KeyError: 'level'|SystemExit: 3)"
    ) as caught:
        reward_of(function).score(PROMPT, "three", "s-9")
    assert caught.value.__cause__ is error
    assert "'three'" in str(caught.value)


def test_a_function_that_is_stuck_is_named_with_its_sample() -> None:
    release = threading.Event()
    reward = reward_of(lambda **_: release.wait(60), timeout_s=0.05)
    start = time.monotonic()
    with pytest.raises(
        RewardError, match=r"sample s-9 \(prompt row 7\) is stuck: no score after reward.timeout_s=0.05 s"
    ):
        reward.score(PROMPT, "3", "s-9")
    release.set()
    assert time.monotonic() - start < 10


def test_is_exact_does_not_ask_the_function() -> None:
    reward = reward_of(lambda **_: 0.0)
    assert reward.is_exact(PROMPT, "3\n")
    assert not reward.is_exact(PROMPT, "33")


def test_finds_a_function_in_the_current_folder(folder: Path) -> None:
    (folder / "my_rewards_here.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) / ground_truth\n",
        encoding="utf-8",
    )
    reward = load_reward(RewardConfig(function="my_rewards_here.score", timeout_s=5))
    assert reward.score(PROMPT, "333", "s-1") == 1.0
    assert reward.timeout_s == 5
    assert pickle.loads(pickle.dumps(reward)) == reward  # noqa: S301 - our own bytes


def test_finds_a_function_in_a_package(folder: Path) -> None:
    package = folder / "my_reward_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text("def score(**kwargs):\n    return 1\n", encoding="utf-8")
    assert load_reward(RewardConfig(function="my_reward_package.inner.score")).score(PROMPT, "", "s-1") == 1.0


@pytest.mark.parametrize("path", ["exact_mach", "my rewards.score", "rewards:score", ".score", "rewards."])
def test_a_name_that_is_no_path(path: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"reward.function={path}: expected 'exact_match' or a dotted path")
    ):
        load_reward(RewardConfig(function=path))


def test_a_module_that_is_not_there(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"reward.function=no_such_rewards.score: module .* cannot be imported"
    ) as caught:
        load_reward(RewardConfig(function="no_such_rewards.score"))
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert str(folder) in str(caught.value)


def test_a_module_that_fails(folder: Path) -> None:
    (folder / "my_failing_rewards.py").write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"cannot be imported .ZeroDivisionError: division by zero") as caught:
        load_reward(RewardConfig(function="my_failing_rewards.score"))
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
        ("async def score(**kwargs): pass", "is an async function"),
    ],
)
def test_what_is_no_reward_function(folder: Path, request: pytest.FixtureRequest, code: str, message: str) -> None:
    name = f"my_rewards_{abs(hash(request.node.name))}"
    (folder / f"{name}.py").write_text(code + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_reward(RewardConfig(function=f"{name}.score"), field="reward.function")
    assert str(caught.value).startswith(f"reward.function={name}.score: ")


@pytest.mark.fault(27)
def test_a_function_that_changes_its_arguments_changes_its_own_call_only() -> None:
    def count(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:  # noqa: ARG001
        extra_info["calls"].append(1)
        ground_truth["answers"].append(2)
        return float(len(extra_info["calls"]) + len(ground_truth["answers"]))

    prompt = Prompt(0, "sums", "1+1=", {"answers": []}, {"calls": []})
    reward = reward_of(count)
    assert [reward.score(prompt, "2", "0-0") for _ in range(2)] == [2.0, 2.0]
    assert (prompt.ground_truth, prompt.extra_info) == ({"answers": []}, {"calls": []})
