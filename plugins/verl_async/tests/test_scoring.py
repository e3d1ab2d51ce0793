"""From tokens to rewards."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import pytest

from plugins.verl_async.tests.fake_rollout import STOP
from plugins.verl_async.tests.fakes import encoded_prompts, learned, make_scorer
from verl_async.data.prompts import Prompt
from verl_async.errors import RewardError
from verl_async.orchestrator.samples import EncodedPrompt, PromptInstance, ScoredGroup
from verl_async.orchestrator.scoring import finished_group
from verl_async.orchestrator.waiting import together
from verl_async.orchestrator.workflow import Trajectory
from verl_async.rollout.interface import Generation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.orchestrator.scoring import Scorer

INSTANCE = PromptInstance(4, encoded_prompts(1)[0])
RIGHT = Generation([11, 12, STOP], [-1.0] * 3, [0] * 3, "stop")
WRONG = Generation([11], [-1.0], [0], "length")


async def score_group(
    scorer: Scorer, generations: Sequence[Generation], instance: PromptInstance = INSTANCE
) -> ScoredGroup:
    whole = [Trajectory((one,)) for one in generations]
    scores = await together(
        *(scorer.score(instance, instance.sample_id(place), one) for place, one in enumerate(whole))
    )
    return finished_group(instance, whole, scores)


def score(scorer: Scorer, *generations: Generation, instance: PromptInstance = INSTANCE) -> ScoredGroup:
    return asyncio.run(score_group(scorer, generations, instance))


def test_each_sample_gets_its_reward_and_whether_it_is_exact() -> None:
    group = score(make_scorer(lambda text: 0.5 * len(text)), RIGHT, WRONG)
    assert group.instance is INSTANCE
    assert group.trajectories == (Trajectory((RIGHT,)), Trajectory((WRONG,)))
    assert group.rewards == (2.5, 1.0)  # "11 12" without the closing token, and "11"
    assert group.exact == (True, False)
    assert list(group.metrics) == [{"length": 5}, {"length": 2}]
    assert (group.num_errors, group.num_dropped) == (0, 0)


def test_all_samples_of_a_group_are_scored_at_once() -> None:
    async def main() -> ScoredGroup:
        all_here = asyncio.Barrier(3)

        async def wait(_: str) -> float:
            await all_here.wait()
            return 1.0

        return await asyncio.wait_for(score_group(make_scorer(wait), [WRONG] * 3), 5.0)

    assert asyncio.run(main()).rewards == (1.0,) * 3


def test_the_first_failure_ends_the_calls_beside_it() -> None:
    ended: list[str] = []

    async def fail_or_wait(text: str) -> float:
        if text == "11":
            raise KeyError(text)
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(text)
        return 0.0

    with pytest.raises(RewardError, match=r"sample 4-1 \(prompt row 0\) raised KeyError"):
        score(make_scorer(fail_or_wait), RIGHT, WRONG)
    assert ended == ["11 12"]


def test_samples_without_a_reward_leave_their_group_and_are_named() -> None:
    said: list[str] = []
    scorer = make_scorer(lambda text: None if text == "11" else 1.0, said.append)
    group = score(scorer, WRONG, RIGHT, RIGHT)
    assert (group.trajectories, group.exact, group.num_dropped, group.is_dropped) == (
        (Trajectory((RIGHT,)),) * 2,
        (True,) * 2,
        1,
        False,
    )
    assert said == ["warning: sample 4-0 failed: the sample leaves its group"]
    lost = score(scorer, WRONG, RIGHT)
    assert (lost.num_dropped, lost.is_dropped) == (1, True)
    assert scorer.metrics([group, lost]) == {
        "reward": 1.0,
        "exact_match": 1.0,
        "reward/length": 5.0,
        "scoring/errors": 2.0,
        "scoring/dropped_samples": 2.0,
        "scoring/dropped_groups": 1.0,
    }
    sequences = learned([group, lost], drop_uniform_groups=False)
    assert [len(sequence) for sequence in sequences] == [5, 5]


def test_of_very_many_failures_the_first_are_named_and_all_are_counted() -> None:
    said: list[str] = []
    scorer = make_scorer(lambda _: None, said.append)
    group = score(scorer, *[WRONG] * 150)
    assert len(said) == 21
    assert said[-1].endswith("further ones are only counted, in scoring/errors")
    assert scorer.metrics([group])["scoring/errors"] == 150.0


def test_advantages_are_relative_to_the_samples_that_are_left() -> None:
    scorer = make_scorer(lambda text: None if text == "11" else float(len(text)))
    group = score(scorer, RIGHT, WRONG, Generation([7], [-1.0], [0], "stop"))
    sequences = learned([group], advantage="dr_grpo")
    assert [sequence.fields["advantages"][-1] for sequence in sequences] == [2.0, -2.0]  # 5 and 1, around 3


def test_figures_of_each_data_source_where_there_are_several() -> None:
    scorer = make_scorer(lambda text: float(len(text)), data_sources=frozenset({"counting", "chess"}))
    other = PromptInstance(5, EncodedPrompt(Prompt(1, "chess", "", "11", {}), (10,)))
    metrics = scorer.metrics([score(scorer, RIGHT, WRONG), score(scorer, WRONG, instance=other)])
    assert metrics == {
        "reward": 3.0,
        "exact_match": pytest.approx(2 / 3),
        "reward/length": 3.0,
        "data_source/counting/reward": 3.5,
        "data_source/counting/exact_match": 0.5,
        "data_source/counting/reward/length": 3.5,
        "data_source/chess/reward": 2.0,
        "data_source/chess/exact_match": 1.0,
        "data_source/chess/reward/length": 2.0,
    }
    assert "data_source/counting/reward" in scorer.metrics([score(scorer, RIGHT)])


def test_a_metric_that_is_not_finite_is_said_to_be_so() -> None:
    scorer = make_scorer(lambda text: math.inf if text == "11" else -math.inf)
    assert math.isnan(scorer.metrics([score(scorer, RIGHT, WRONG)])["reward"])
