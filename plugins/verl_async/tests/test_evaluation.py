"""Held-out prompts, answered by all workers together."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_async.tests.fake_rollout import FakeRollout
from plugins.verl_async.tests.fakes import FakeListener, FakePool, encoded_prompts, make_group, make_scorer
from verl_async.config import RolloutConfig
from verl_async.errors import RolloutError
from verl_async.evaluation_config import EvaluationSetConfig
from verl_async.orchestrator.evaluation import SEED, Evaluation, EvaluationSet
from verl_async.orchestrator.pass_at_k import pass_at_k, solved
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.waiting import end, task_group
from verl_async.orchestrator.workflow import SingleTurn
from verl_async.rollout.interface import SamplingParams
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.rollout.interface import GenerationRequest


class Unequal(FakeRollout):
    """Answers prompt 10 with two tokens and the closing one, which is right; others with one more."""

    def length(self, request: GenerationRequest) -> int:
        return 3 if request.prompt_ids[0] == 10 else 4


def evaluation_of(
    rollouts: Sequence[FakeRollout],
    num_prompts: int = 4,
    timeout_s: float = 5.0,
    deterministic: bool = False,
    every_steps: int | None = None,
    names: Sequence[str] = ("sums",),
    **config: Any,
) -> Evaluation:
    timeline, scorer = Timeline(), make_scorer(lambda text: float(len(text.split())))
    one = EvaluationSetConfig.model_validate({"prompts": "held_out.jsonl", **config})
    sampler = Sampler(SingleTurn(), scorer, SamplingParams(8, temperature=0.0), SEED)
    return Evaluation(
        sets=[
            EvaluationSet(name, one, encoded_prompts(num_prompts), replace(sampler, held_out=name)) for name in names
        ],
        workers=[RolloutWorker(rollout, timeline, timeout_s) for rollout in rollouts],
        timeline=timeline,
        listener=FakeListener(),
        every_steps=every_steps,
        rollout=RolloutConfig(n=2, max_batch_prompts=1, timeout_s=timeout_s, deterministic=deterministic),
        stops_training=True,
        timeout_s=timeout_s,
    )


async def begun(evaluation: Evaluation, step: int) -> bool:
    """Evaluate after one of ten steps."""
    async with task_group() as tasks:
        return await evaluation.begin(step, 10, tasks)


def test_figures_worked_by_hand() -> None:
    metrics = asyncio.run(evaluation_of([Unequal()]).run())
    assert metrics == {
        "sums/exact_match": 0.25,
        "sums/mean@1": 0.25,
        "sums/reward": (2 + 3 + 3 + 3) / 4,
        "sums/reward/length": (5 + 8 + 8 + 8) / 4,
        "sums/response_tokens": (3 + 4 + 4 + 4) / 4,
    }


def test_prompts_that_cannot_be_scored_are_left_out_and_counted() -> None:
    evaluation = evaluation_of([Unequal()], stop_at_exact_match=0.5)
    evaluation.sets[0].sampler.scorer.pool = FakePool(lambda text: None if text == "11 12" else 1.0)
    metrics = asyncio.run(evaluation.run())
    names = ("sums/reward", "sums/exact_match", "sums/mean@1", "sums/response_tokens")
    assert [metrics[name] for name in names] == [1.0, 0.0, 0.0, 4.0]
    assert metrics["sums/scoring/dropped_samples"] == 1.0
    evaluation.sets[0].sampler.scorer.pool = FakePool(lambda _: None)
    assert not asyncio.run(begun(evaluation, 0))


@pytest.mark.parametrize("num_samples", range(1, 7))
def test_pass_at_k_is_the_share_of_all_ways_to_choose_k_responses(num_samples: int) -> None:
    for num_correct in range(num_samples + 1):
        correct = [place < num_correct for place in range(num_samples)]
        for k in range(1, num_samples + 1):
            ways = list(combinations(correct, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(sum(map(any, ways)) / len(ways))


def test_mean_and_pass_at_k_of_a_prompt_by_hand() -> None:
    group = make_group(rewards=(0.0, 0.0, 0.4, 1.0, 0.0))
    assert dict(solved(group, 5, None)) == pytest.approx(
        {"mean@5": 2 / 5, "pass@2": 1 - 3 / 10, "pass@4": 1.0, "pass@5": 1.0}
    )
    assert dict(solved(group, 5, 0.5)) == pytest.approx(
        {"mean@5": 1 / 5, "pass@2": 2 / 5, "pass@4": 4 / 5, "pass@5": 1.0}
    )
    assert dict(solved(group, 6, 0.5)).keys() == {"mean@6", "pass@2", "pass@4"}, "one could not be scored"
    assert dict(solved(make_group(rewards=()), 6, None)) == {}


def test_several_sets_with_several_samples_each_have_metrics_of_their_own() -> None:
    rollouts = [Unequal(0), Unequal(1)]
    evaluation = evaluation_of(rollouts, num_prompts=3, num_samples=4, names=("sums", "more"), correct_reward=3)
    for one in evaluation.sets:
        one.sampler.scorer.data_sources = frozenset({"counting", "sums"})
    metrics = asyncio.run(evaluation.run())
    for name in ("sums", "more"):
        assert {
            key.partition("/")[2]: value for key, value in metrics.items() if key.startswith(name)
        } == pytest.approx(
            {"exact_match": 1 / 3, "reward": 8 / 3, "reward/length": 7.0, "response_tokens": 11 / 3}
            | {"mean@4": 2 / 3, "pass@2": 2 / 3, "pass@4": 2 / 3}
        )
    assert [rollout.most_running for rollout in rollouts] == [4, 4]
    first_four = [asked_of(rollout)[:4] for rollout in rollouts]
    assert first_four == [[[10]] * 4, [[20]] * 4], "the samples of a prompt are at one worker, at once"


def test_data_sources_of_a_set_have_metrics_of_their_own() -> None:
    evaluation = evaluation_of([Unequal()], num_samples=2)
    first, *others = evaluation.sets[0].prompts
    other = replace(first, prompt=replace(first.prompt, data_source="other"))
    evaluation.sets = [replace(evaluation.sets[0], prompts=[other, *others])]
    evaluation.sets[0].sampler.scorer.data_sources = frozenset({"counting", "other"})
    metrics = asyncio.run(evaluation.run())
    assert metrics["sums/data_source/other/pass@2"] == 1.0
    assert metrics["sums/data_source/counting/pass@2"] == 0.0


def asked_of(rollout: FakeRollout) -> list[list[int]]:
    return [[request.prompt_ids[0] for request in call] for call in rollout.calls]


def test_workers_share_the_prompts_and_have_as_many_at_once_as_in_training() -> None:
    rollouts = [FakeRollout(0), FakeRollout(1)]
    evaluation = evaluation_of(rollouts, num_prompts=7)
    asyncio.run(evaluation.run())
    assert list(map(asked_of, rollouts)) == [[[10], [30], [50], [70]], [[20], [40], [60]]]
    assert [rollout.most_running for rollout in rollouts] == [2, 2]
    assert {request.sampling.temperature for call in rollouts[0].calls for request in call} == {0.0}
    assert {span.who for span in evaluation.timeline.spans} >= {"rollouter-0", "rollouter-1"}


def test_in_deterministic_mode_batches_are_as_large_as_in_training() -> None:
    rollouts = [FakeRollout(0), FakeRollout(1)]
    asyncio.run(evaluation_of(rollouts, num_prompts=7, deterministic=True).run())
    assert list(map(asked_of, rollouts)) == [[[10, 30], [50, 70]], [[20, 40], [60]]]
    assert all(sealed for rollout in rollouts for sealed in rollout.sealed)


def test_more_workers_than_prompts() -> None:
    metrics = asyncio.run(evaluation_of([FakeRollout(0), FakeRollout(1), FakeRollout(2)], num_prompts=1).run())
    assert metrics["sums/exact_match"] == 1.0


def test_every_evaluation_draws_from_the_same_streams() -> None:
    rollout = FakeRollout()
    evaluation = evaluation_of([rollout], num_prompts=2)
    asyncio.run(evaluation.run())
    asyncio.run(evaluation.run())
    first, second = rollout.calls[:2], rollout.calls[2:]
    assert [one.seeds for [one] in first] == [one.seeds for [one] in second]
    assert len({one.seeds for [one] in first}) == 2


def test_when_it_is_due() -> None:
    ends_only, often = evaluation_of([]), evaluation_of([], every_steps=4)
    assert [step for step in range(11) if ends_only.is_due(step, 10)] == [0, 10]
    assert [step for step in range(11) if often.is_due(step, 10)] == [0, 4, 8, 10]


@pytest.mark.parametrize(("aim", "reached"), [(None, False), (0.25, True), (0.26, False)])
def test_the_listener_is_told_and_the_aim_compared(aim: float | None, reached: bool) -> None:
    evaluation = evaluation_of([Unequal()], stop_at_exact_match=aim)
    assert asyncio.run(begun(evaluation, 10)) is reached
    listener = evaluation.listener
    assert isinstance(listener, FakeListener)
    [(step, metrics)] = listener.evaluations
    assert (step, metrics["sums/exact_match"]) == (10, 0.25)
    assert listener.statuses == ["evaluating on 4 prompts", "training"]
    assert {"trainer", "evaluation"} <= {span.who for span in evaluation.timeline.spans}


def test_who_waits_for_one_that_does_not_end_says_so() -> None:
    async def main() -> None:
        rollout = FakeRollout(token_s=100)
        evaluation = evaluation_of([rollout], timeout_s=0.05, every_steps=3)
        evaluation.stops_training = False
        try:
            async with task_group() as tasks:
                assert not await evaluation.begin(3, 10, tasks)
                await evaluation.generated()
        finally:
            await end(*rollout.tasks)

    with pytest.raises(StuckError, match="the evaluation after step 3 did not finish generating for a weight sync"):
        asyncio.run(main())


def test_a_worker_that_fails_ends_the_answers_of_the_others() -> None:
    class Failing(FakeRollout):
        def submit(self, *_: object, **__: object) -> None:
            raise RolloutError("the engine has died")

    async def main() -> None:
        rollouts = [FakeRollout(0, token_s=0.01), Failing(1)]
        with pytest.raises(RolloutError, match="has died"):
            await evaluation_of(rollouts).run()
        await end(*rollouts[0].tasks)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
