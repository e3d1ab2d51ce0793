"""Rewards in processes: what hangs, crashes or fails costs its own sample; the others are scored."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from verl_async.data.prompts import Prompt
from verl_async.data.reward_pool import RewardPool, Score
from verl_async.data.reward_process import RewardTraceback
from verl_async.data.rewards import Sample
from verl_async.errors import RewardError
from verl_async.reward_config import RewardConfig
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    Scoring = Callable[..., list[Any]]

PROMPT = Prompt(index=7, data_source="addition", prompt="1+2=", ground_truth=3, extra_info={"level": 1})
SCORE = "def score(data_source, solution_str, ground_truth, extra_info):\n"
SERVES = (
    "import asyncio, itertools, os, signal, subprocess, time\ncalls = itertools.count()\n" + SCORE + "    "
    "do = solution_str\n"
    "    if do == 'exit': os._exit(0)\n"
    "    if do.startswith('hang'):\n"
    "        child = subprocess.Popen(['sleep', '60'])\n"
    "        open(do, 'w').write(f'{os.getpid()} {child.pid}')\n"
    "        time.sleep(60)\n"
    "    if do == 'nap': time.sleep(0.3)\n"
    "    if do == 'sys.exit': raise SystemExit(0)\n"
    "    if do == 'pid': return os.getpid()\n"
    "    if do == 'signals': signal.signal(signal.SIGALRM, signal.SIG_DFL)\n"
    "    if do == 'none': return None\n"
    "    extra_info['level'] += 1\n"
    "    return extra_info['level'] + 10 * next(calls)\n"
)
AWAITS = (
    "import asyncio, os, time\nasync "
    + SCORE
    + (
        "    kind, _, seconds = solution_str.partition(' ')\n"
        "    if kind == 'exit': os._exit(3)\n"
        "    if kind == 'block': time.sleep(float(seconds))\n"
        "    if kind == 'fail': raise TimeoutError('its own')\n"
        "    await asyncio.sleep(float(seconds or 0))\n"
        "    return {'score': 1, 'pid': os.getpid()}\n"
    )
)


@pytest.fixture
def scoring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scoring:
    """Score some solutions at once, by a module with some code; a RewardError stands for a sample that has one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "so_that_sys_path_is_restored")

    def run(code: str, *solutions: str, in_turn: bool = False, **changes: Any) -> list[Any]:
        Path("some_rewards.py").write_text(code)
        named = {} if "functions" in changes else {"function": "some_rewards:score"}
        config = RewardConfig.model_validate({**named, "timeout_s": 20.0, **changes})

        async def main() -> list[Any]:
            async with RewardPool(config) as pool:
                calls = (pool.score(Sample(PROMPT, text, f"s-{index}")) for index, text in enumerate(solutions))
                if in_turn:
                    return [await call for call in calls]
                return await asyncio.gather(*calls, return_exceptions=True)

        return asyncio.run(main())

    return run


def rewards(found: list[Any]) -> list[Any]:
    return [one.reward if isinstance(one, Score) else type(one) for one in found]


def wait_for_file(path: Path) -> None:
    while not path.exists() or not path.read_text():
        time.sleep(0.02)


def is_running(process: int) -> bool:
    with suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    return False


def end_soon(processes: list[int]) -> bool:
    """Whether they end; one that was killed takes a moment to, and what it started is nobody's to wait for."""
    deadline = time.monotonic() + 20  # they sleep for 60 seconds
    while any(map(is_running, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_exact_match_needs_no_process(scoring: Scoring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.Popen", None)
    assert scoring("", "3 ", "4", function=None) == [Score(1.0, True, {}), Score(0.0, False, {})]


@pytest.mark.fault(27)
def test_a_function_runs_elsewhere_and_keeps_what_it_remembers(
    scoring: Scoring, capfd: pytest.CaptureFixture[str]
) -> None:
    found = scoring(SERVES + "print('imported')\n", "", "", "pid", "signals", in_turn=True)
    assert rewards(found)[:2] == [2.0, 12.0]
    assert rewards(found)[3] == 22.0, "functions may use signals"
    process = int(found[2].reward)
    assert process != os.getpid()
    assert end_soon([process])
    assert PROMPT.extra_info == {"level": 1}
    assert capfd.readouterr().out == "imported\n"


def test_processes_start_when_all_others_are_busy(scoring: Scoring) -> None:
    one_by_one = {one.reward for one in scoring(SERVES, "pid", "pid", "pid", num_processes=3, in_turn=True)}
    assert len(one_by_one) == 1
    naps = SERVES.replace("return os.getpid()", "(time.sleep(1), None); return os.getpid()")
    started = time.monotonic()
    assert len({one.reward for one in scoring(naps, *["pid"] * 3, num_processes=3)}) == 3
    assert time.monotonic() - started < 15


def test_a_call_that_hangs_is_ended_with_what_it_started_and_the_others_are_scored(scoring: Scoring) -> None:
    found = scoring(SERVES, "hang-1", "", "nap", "hang-2", "", num_processes=2, timeout_s=1.0, on_error="drop")
    assert [one.reward is None for one in found] == [True, False, False, True, False]
    text = "sample s-0 (prompt row 7) is stuck: no score after reward.timeout_s=1 seconds"
    assert found[0].errors[0].endswith(text)
    for name in ("hang-1", "hang-2"):
        assert end_soon(list(map(int, Path(name).read_text().split())))


@pytest.mark.fault(15)
def test_a_function_that_ends_its_process_is_named_with_its_file(scoring: Scoring, tmp_path: Path) -> None:
    for one in scoring(SERVES, "exit", "exit", "")[:2]:
        assert isinstance(one, RewardError)
        assert str(one).startswith(f"reward.function=some_rewards:score ({tmp_path / 'some_rewards.py'}): sample s-")
        assert "(prompt row 7) ended the process that scores: it ended with exit status 0" in str(one)
    assert rewards(scoring(SERVES, "exit", "", in_turn=False)) == [RewardError, 2.0]


@pytest.mark.fault(15)
def test_an_error_keeps_its_message_and_its_traceback(scoring: Scoring) -> None:
    failed, fine = scoring(SERVES, "sys.exit", "")
    assert "sample s-0 (prompt row 7) raised SystemExit: 0; for the answer 'sys.exit'" in str(failed)
    assert isinstance(failed.__cause__, RewardTraceback)
    assert "some_rewards.py" in str(failed.__cause__)
    assert fine.reward == 2.0


@pytest.mark.parametrize(("on_error", "reward"), [("zero", 0.0), ("drop", None)])
def test_what_a_failing_reward_costs(scoring: Scoring, on_error: str, reward: float | None) -> None:
    (score,) = scoring(SERVES, "none", on_error=on_error)
    assert (score.reward, score.is_exact) == (reward, False)
    assert "sample s-0 (prompt row 7) gave null; expected a finite number" in score.errors[0]


def test_async_functions_are_awaited_many_at_once(scoring: Scoring) -> None:
    started = time.monotonic()
    found = scoring(AWAITS, *["wait 1"] * 40)
    assert rewards(found) == [1.0] * 40
    assert len({one.metrics["pid"] for one in found}) == 1
    assert time.monotonic() - started < 20
    found = scoring(AWAITS, "fail", "wait 30", "wait 0", timeout_s=1.0)
    assert rewards(found) == [RewardError, RewardError, 1.0]
    assert "raised TimeoutError: its own" in str(found[0])
    assert "s-1 (prompt row 7) is stuck: no score after reward.timeout_s=1 seconds" in str(found[1])


def test_no_more_async_calls_at_once_than_allowed(scoring: Scoring) -> None:
    code = (
        "import asyncio\nbusy = most = 0\nasync "
        + SCORE
        + (
            "    global busy, most\n    busy += 1\n    most = max(most, busy)\n"
            "    await asyncio.sleep(0.01)\n    busy -= 1\n    return most\n"
        )
    )
    assert max(rewards(scoring(code, *[""] * 12, max_async_calls=3))) == 3.0


@pytest.mark.parametrize("fault", ["block 60", "exit"])
def test_calls_beside_one_that_blocks_or_ends_their_process_are_made_again(
    scoring: Scoring, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr("verl_async.data.reward_process._GRACE_S", 0.5)
    found = scoring(AWAITS, "wait 0.2", "wait 0.3", fault, "wait 0", "wait 0.1", timeout_s=0.7)
    assert rewards(found) == [1.0, 1.0, RewardError, 1.0, 1.0]


@pytest.mark.usefixtures("scoring")
def test_a_cancelled_call_holds_up_no_other() -> None:
    Path("some_rewards.py").write_text(SERVES)

    async def main() -> None:
        async with RewardPool(RewardConfig(function="some_rewards:score")) as pool:
            hanging = asyncio.ensure_future(pool.score(Sample(PROMPT, "hang", "s-0")))
            await asyncio.to_thread(wait_for_file, Path("hang"))
            hanging.cancel()
            assert (await pool.score(Sample(PROMPT, "", "s-1"))).reward == 2.0

    asyncio.run(asyncio.wait_for(main(), 30))
    assert end_soon(list(map(int, Path("hang").read_text().split())))


TWO = (
    SERVES
    + "def brief(data_source, solution_str, **_):\n    return {'score': -len(solution_str), 'kind': data_source}\n"
)


def test_several_rewards_are_weighted_and_chosen_by_data_source(scoring: Scoring) -> None:
    functions: list[dict[str, Any]] = [
        {"function": "some_rewards:brief", "weight": 0.5},
        {"function": "exact_match", "weight": 3.0, "data_sources": ["addition"], "name": "right"},
        {"function": "some_rewards:score", "data_sources": ["chess"]},
    ]
    assert scoring(TWO, "3 ", functions=functions) == [
        Score(2.0, True, {"brief/score": -2.0, "right/score": 1.0}),
    ]
    functions[2] = {"function": "some_rewards:score"}
    (score,) = scoring(TWO, "none", functions=functions, on_error="zero")
    assert (score.reward, sorted(score.metrics)) == (-2.0, ["brief/score", "right/score"])
    assert score.errors[0].startswith("reward.functions[2].function=some_rewards:score (")
    (error,) = scoring(TWO, "", functions=[functions[1], {**functions[0], "data_sources": ["x"]}])
    assert rewards([error]) == [0.0]
    (error,) = scoring(TWO, "", functions=[{**functions[0], "data_sources": ["x"]}])
    assert isinstance(error, ConfigError)
    assert "none scores prompts of data_source 'addition'" in str(error)


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
    scoring: Scoring, capfd: pytest.CaptureFixture[str], code: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        scoring(code + "\n", "")
    assert str(caught.value).startswith("reward.function=some_rewards:score: ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.fault(15)
def test_a_module_that_reads_arguments_does_not_see_the_jobs(scoring: Scoring) -> None:
    code = "import argparse; p = argparse.ArgumentParser(); p.add_argument('--k', default=4); k = p.parse_args().k\n"
    assert rewards(scoring(code + SCORE + "    return k\n", "")) == [4.0]
