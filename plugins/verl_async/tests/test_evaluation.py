"""Held-out prompts, answered by all workers together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_async.tests.fake_rollout import FakeRollout
from plugins.verl_async.tests.fakes import FakeListener, FakePool, encoded_prompts, make_scorer
from verl_async.config import EvaluationConfig, RolloutConfig
from verl_async.errors import RolloutError
from verl_async.orchestrator.evaluation import SEED, Evaluation
from verl_async.orchestrator.rollout_worker import RolloutWorker
from verl_async.orchestrator.sampler import Sampler
from verl_async.orchestrator.timeline import Timeline
from verl_async.orchestrator.waiting import end
from verl_async.orchestrator.workflow import SingleTurn
from verl_async.rollout.interface import SamplingParams

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
    **config: Any,
) -> Evaluation:
    timeline, scorer = Timeline(), make_scorer(lambda text: float(len(text.split())))
    return Evaluation(
        prompts=encoded_prompts(num_prompts),
        workers=[RolloutWorker(rollout, timeline, timeout_s) for rollout in rollouts],
        sampler=Sampler(SingleTurn(), scorer, SamplingParams(8, temperature=0.0), SEED),
        timeline=timeline,
        listener=FakeListener(),
        config=EvaluationConfig.model_validate({"prompts": "held_out.jsonl", **config}),
        rollout=RolloutConfig(n=2, max_batch_prompts=1, timeout_s=timeout_s, deterministic=deterministic),
    )


def test_figures_worked_by_hand() -> None:
    figures = asyncio.run(evaluation_of([Unequal()]).run())
    assert figures == {
        "exact_match": 0.25,
        "reward": (2 + 3 + 3 + 3) / 4,
        "reward/length": (5 + 8 + 8 + 8) / 4,
        "response_tokens": (3 + 4 + 4 + 4) / 4,
    }


def test_prompts_that_cannot_be_scored_are_left_out_and_counted() -> None:
    evaluation = evaluation_of([Unequal()], stop_at_exact_match=0.5)
    evaluation.sampler.scorer.pool = FakePool(lambda text: None if text == "11 12" else 1.0)
    figures = asyncio.run(evaluation.run())
    assert (figures["reward"], figures["exact_match"], figures["response_tokens"]) == (1.0, 0.0, 4.0)
    assert figures["scoring/dropped_samples"] == 1.0
    evaluation.sampler.scorer.pool = FakePool(lambda _: None)
    assert not asyncio.run(evaluation.run_and_report(0))


def asked_of(rollout: FakeRollout) -> list[list[int]]:
    return [[request.prompt_ids[0] for request in call] for call in rollout.calls]


def test_workers_share_the_prompts_and_have_all_at_once() -> None:
    rollouts = [FakeRollout(0), FakeRollout(1)]
    evaluation = evaluation_of(rollouts, num_prompts=7)
    asyncio.run(evaluation.run())
    assert list(map(asked_of, rollouts)) == [[[10], [30], [50], [70]], [[20], [40], [60]]]
    assert rollouts[0].most_running == 4
    assert {request.sampling.temperature for call in rollouts[0].calls for request in call} == {0.0}
    assert {span.who for span in evaluation.timeline.spans} >= {"rollouter-0", "rollouter-1"}


def test_in_deterministic_mode_batches_are_as_large_as_in_training() -> None:
    rollouts = [FakeRollout(0), FakeRollout(1)]
    asyncio.run(evaluation_of(rollouts, num_prompts=7, deterministic=True).run())
    assert list(map(asked_of, rollouts)) == [[[10, 30], [50, 70]], [[20, 40], [60]]]
    assert all(sealed for rollout in rollouts for sealed in rollout.sealed)


def test_more_workers_than_prompts() -> None:
    figures = asyncio.run(evaluation_of([FakeRollout(0), FakeRollout(1), FakeRollout(2)], num_prompts=1).run())
    assert figures["exact_match"] == 1.0


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
    assert asyncio.run(evaluation.run_and_report(3)) is reached
    listener = evaluation.listener
    assert isinstance(listener, FakeListener)
    [(step, figures)] = listener.evaluations
    assert (step, figures["exact_match"]) == (3, 0.25)
    assert listener.statuses == ["evaluating on 4 prompts", "training"]
    assert "trainer" in {span.who for span in evaluation.timeline.spans}


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
