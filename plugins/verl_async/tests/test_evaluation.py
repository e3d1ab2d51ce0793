"""Held-out prompts, answered by all workers together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_async.tests.fakes import FakeListener, FakePool, FakeRollout, encoded_prompts, make_scorer
from verl_async.config import EvaluationConfig, RolloutConfig
from verl_async.orchestrator.actors import RolloutWorker
from verl_async.orchestrator.evaluation import Evaluation
from verl_async.orchestrator.timeline import Timeline
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
    rollouts: Sequence[FakeRollout], num_prompts: int = 4, timeout_s: float = 5.0, **config: Any
) -> Evaluation:
    return Evaluation(
        prompts=encoded_prompts(num_prompts),
        workers=[RolloutWorker(rollout) for rollout in rollouts],
        scorer=make_scorer(lambda text: float(len(text.split()))),
        timeline=Timeline(),
        listener=FakeListener(),
        config=EvaluationConfig.model_validate({"prompts": "held_out.jsonl", **config}),
        rollout=RolloutConfig(n=2, max_batch_prompts=1, timeout_s=timeout_s),
        sampling=SamplingParams(8, temperature=0.0),
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
    evaluation.scorer.pool = FakePool(lambda text: None if text == "11 12" else 1.0)
    figures = asyncio.run(evaluation.run())
    assert (figures["reward"], figures["exact_match"], figures["response_tokens"]) == (1.0, 0.0, 4.0)
    assert figures["scoring/dropped_samples"] == 1.0
    evaluation.scorer.pool = FakePool(lambda _: None)
    assert not asyncio.run(evaluation.run_and_report(0))


def test_workers_share_the_prompts_and_decode_as_many_sequences_as_in_training() -> None:
    rollouts = [FakeRollout(0), FakeRollout(1)]
    evaluation = evaluation_of(rollouts, num_prompts=7)
    asyncio.run(evaluation.run())
    asked = [[[request.prompt_ids[0] for request in call] for call in rollout.calls] for rollout in rollouts]
    assert asked == [[[10, 30], [50, 70]], [[20, 40], [60]]]
    assert {request.sampling.temperature for call in rollouts[0].calls for request in call} == {0.0}
    assert {span.who for span in evaluation.timeline.spans} == {"rollouter-0", "rollouter-1"}


def test_more_workers_than_prompts() -> None:
    figures = asyncio.run(evaluation_of([FakeRollout(0), FakeRollout(1), FakeRollout(2)], num_prompts=1).run())
    assert figures["exact_match"] == 1.0


def test_every_evaluation_draws_from_the_same_streams() -> None:
    rollout = FakeRollout()
    evaluation = evaluation_of([rollout], num_prompts=2)
    asyncio.run(evaluation.run())
    asyncio.run(evaluation.run())
    first, second = rollout.calls
    assert [request.seeds for request in first] == [request.seeds for request in second]
    assert len({request.seeds for request in first}) == 2


def test_workers_finish_what_they_generate_first() -> None:
    async def main() -> None:
        rollout = FakeRollout(token_s=0.005, num_tokens=8)
        evaluation = evaluation_of([rollout], num_prompts=1)
        [worker] = evaluation.workers

        async def generate() -> str:
            async with worker.using() as client:
                [answer] = await client.generate([evaluation_request()])
                return answer.finish_reason

        generating = asyncio.ensure_future(generate())
        await asyncio.sleep(0.01)
        await evaluation.run()
        assert await generating == "stop"
        assert rollout.num_interrupts == 0

    asyncio.run(main())


def evaluation_request() -> GenerationRequest:
    from verl_async.orchestrator.samples import Draw

    return Draw(0, encoded_prompts(1)[0]).requests(1, SamplingParams(8), 0)[0]


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


def test_a_worker_that_does_not_answer_is_named_and_the_others_end() -> None:
    async def main() -> None:
        evaluation = evaluation_of([FakeRollout(0), FakeRollout(1, token_s=100)], timeout_s=0.5)
        with pytest.raises(StuckError, match=r"rollouter-1 did not answer 2 evaluation prompts within 0\.5 s"):
            await evaluation.run()
        assert not any(worker._lock.locked() for worker in evaluation.workers)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
