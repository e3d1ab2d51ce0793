"""A user's reward function in a process of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from verl_async.config import RewardConfig
from verl_async.data.prompts import Prompt
from verl_async.data.reward_process import RewardProcess, RewardTraceback, open_reward
from verl_async.data.rewards import Reward
from verl_async.errors import RewardError
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = Prompt(index=7, data_source="addition", prompt="1+2=", ground_truth=3, extra_info={"level": 1})

SCORE = "def score(data_source, solution_str, ground_truth, extra_info):\n"
SERVES = (
    "import itertools, os, time\ncalls = itertools.count()\n" + SCORE + "    print('called')\n"
    "    if solution_str == 'exit': os._exit(0)\n"
    "    if solution_str == 'hang': time.sleep(60)\n"
    "    if solution_str == 'sys.exit': raise SystemExit(0)\n"
    "    if solution_str == 'pid': return os.getpid()\n"
    "    extra_info['level'] += 1\n"
    "    return extra_info['level'] + 10 * next(calls)\n"
)


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reward | RewardProcess]:
    """Open the function `score` of a module with some code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "so_that_sys_path_is_restored")

    def write_and_open(code: str, timeout_s: float = 20.0) -> Reward | RewardProcess:
        Path("some_rewards.py").write_text(code)
        return open_reward(RewardConfig(function="some_rewards.score", timeout_s=timeout_s))

    return write_and_open


def test_exact_match_needs_no_process() -> None:
    assert isinstance(open_reward(RewardConfig()), Reward)


def test_a_users_function_runs_elsewhere_and_keeps_what_it_remembers(
    opened: Callable[..., Reward | RewardProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    reward = opened(SERVES)
    assert [reward.score(PROMPT, "", "s-1") for _ in range(2)] == [2.0, 12.0]
    assert PROMPT.extra_info == {"level": 1}
    process = int(reward.score(PROMPT, "pid", "s-1"))
    assert process != os.getpid()
    assert (reward.is_exact(PROMPT, "3 "), reward.is_exact(PROMPT, "4")) == (True, False)
    assert capfd.readouterr().out == "called\n" * 3
    del reward
    assert not Path(f"/proc/{process}").exists()


def test_calls_run_beside_each_other(opened: Callable[..., Reward | RewardProcess]) -> None:
    reward = opened(
        "import threading\nall_here = threading.Barrier(3)\n" + SCORE + "    return all_here.wait(20) >= 0\n"
    )
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda _: reward.score(PROMPT, "", "s-1"), range(3))) == [1.0] * 3


@pytest.mark.fault(15)
def test_a_function_that_ends_its_process_is_named_with_its_file(
    opened: Callable[..., Reward | RewardProcess], tmp_path: Path
) -> None:
    reward = opened(SERVES)
    for _ in range(2):
        with pytest.raises(RewardError) as caught:
            reward.score(PROMPT, "exit", "s-9")
        message = str(caught.value)
        assert message.startswith(
            f"reward.function=some_rewards.score ({tmp_path / 'some_rewards.py'}): sample s-9 (prompt row 7)"
        )
        assert "it ended with exit status 0" in message


@pytest.mark.fault(15)
def test_an_error_keeps_its_message_and_its_traceback(opened: Callable[..., Reward | RewardProcess]) -> None:
    reward = opened(SERVES)
    with pytest.raises(RewardError, match=r"sample s-9 \(prompt row 7\) raised SystemExit: 0; for") as caught:
        reward.score(PROMPT, "sys.exit", "s-9")
    assert isinstance(caught.value.__cause__, RewardTraceback)
    assert "some_rewards.py" in str(caught.value.__cause__)
    assert reward.score(PROMPT, "", "s-10") == 2.0  # it goes on


def test_a_function_that_hangs(opened: Callable[..., Reward | RewardProcess]) -> None:
    with pytest.raises(RewardError, match=r"sample s-9 .* is stuck: no score after reward.timeout_s=0.1 seconds"):
        opened(SERVES, timeout_s=0.1).score(PROMPT, "hang", "s-9")


@pytest.mark.fault(15)
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit(0)", r"\(.*some_rewards\.py\) cannot be imported: it calls sys\.exit\(0\); put what"),
        ("import os; os._exit(0)", r"its module cannot be imported: it ended with exit status 0; it must not"),
        ("raise KeyboardInterrupt", r"some_rewards\.py\) cannot be imported \(KeyboardInterrupt: \)"),
        (
            "import argparse; p = argparse.ArgumentParser(); p.add_argument('file'); p.parse_args()",
            r"it calls sys\.exit\(2\); put .*it printed: .*the following arguments are required: file",
        ),
        ("score = 1", "has no function 'score'"),
    ],
)
def test_a_module_that_ends_the_process_is_refused(
    opened: Callable[..., Reward | RewardProcess], capfd: pytest.CaptureFixture[str], code: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        opened(code + "\n")
    assert str(caught.value).startswith("reward.function=some_rewards.score: ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.fault(15)
def test_a_module_that_reads_arguments_does_not_see_the_jobs(opened: Callable[..., Reward | RewardProcess]) -> None:
    code = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--k', default=4); k = p.parse_args().k\n"
    assert opened(code + SCORE + "    return k\n").score(PROMPT, "", "s-1") == 4.0
