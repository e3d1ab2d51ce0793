"""Evaluation beside training: pinned to a version, waited for where it must be, measured, and how it fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from plugins.verl_async.tests.fake_rollout import FakeRollout
from plugins.verl_async.tests.fakes import FakeListener, FakePool, FakeRun, evaluation_section, train_job
from verl_async.errors import RewardError, RolloutError
from verl_async.orchestrator.evaluation import EvaluationSet
from verl_async.orchestrator.workflow import Trajectory
from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from verl_async.data.prompts import Prompt
    from verl_async.data.reward_pool import Score
    from verl_async.data.rewards import Sample
    from verl_async.orchestrator.samples import ScoredGroup
    from verl_async.orchestrator.workflow import WorkflowClient
    from verl_async.rollout.interface import Generation, GenerationRequest

HELD_OUT = 0.5
"""Temperature at which tests sample held-out prompts; nothing else is sampled so."""


class Turns:
    """Two turns of the model, with an environment between them that takes a while."""

    async def run(self, _: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> Sequence[Trajectory]:
        first = await client.generate(token_ids)
        if client.sampling.temperature == HELD_OUT:
            await asyncio.sleep(0.01)
        return [Trajectory((first, (5,), await client.generate((*token_ids, *first.token_ids, 5))))]


class NeverEnds:
    """Hangs with held-out prompts."""

    async def run(self, _: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> Sequence[Trajectory]:
        await asyncio.sleep(100 if client.sampling.temperature == HELD_OUT else 0)
        return [Trajectory((await client.generate(token_ids),))]


class Noting(FakeRollout):
    """Notes when it ends which kind of sample, and takes longer for those of evaluations."""

    def __init__(self, index: int, events: list[str], failure: Exception | None = None) -> None:
        super().__init__(index)
        self.events = events
        self.failure = failure

    def seconds(self, request: GenerationRequest) -> float:
        return 0.004 if request.sampling.temperature == HELD_OUT else 0.0

    async def draw(self, row: Generation, request: GenerationRequest) -> None:
        is_held_out = request.sampling.temperature == HELD_OUT
        assert request.log_probs is not is_held_out
        if is_held_out and self.failure is not None:
            raise self.failure
        await super().draw(row, request)
        self.events.append("held-out sample" if is_held_out else "training sample")


class NotingListener(FakeListener):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def on_status(self, text: str) -> None:
        super().on_status(text)
        if text.startswith("evaluating"):
            self.events.append("begin")

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        super().on_step(step, num_steps, metrics)
        self.events.append(f"step {step}")

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        super().on_evaluation(step, metrics)
        self.events.append(f"evaluation {step}")


class SlowPool(FakePool):
    """Scores held-out samples slowly, or fails with them."""

    fails = False

    async def score(self, sample: Sample) -> Score:
        if sample.sample_id.startswith("sums/"):
            if self.fails:
                raise RewardError(f"sample {sample.sample_id} raised KeyError")
            await asyncio.sleep(0.02)
        return await super().score(sample)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[ScoredGroup]]:
    """What each evaluation was of."""
    found: list[Sequence[ScoredGroup]] = []
    metrics = EvaluationSet.metrics

    def noting(one: EvaluationSet, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        found.append(groups)
        return metrics(one, groups)

    monkeypatch.setattr(EvaluationSet, "metrics", noting)
    return found


def run_of(threshold: float, every_steps: int | None = 3, workflow: str = "Turns", **sections: Any) -> FakeRun:
    """Six steps on two workers, with an evaluation of five prompts, two samples each."""
    events: list[str] = []
    job = train_job(
        **{
            "trainer": {"num_steps": 6},
            "async_training": {"staleness_threshold": threshold},
            "evaluation": evaluation_section(every_steps, temperature=HELD_OUT, num_samples=2),
            "rollout": {"workflow": f"{__name__}:{workflow}"} | sections.pop("rollout", {}),
            **sections,
        }
    )
    return FakeRun(job, rollouts=[Noting(index, events) for index in range(2)], listener=NotingListener(events))


def events_of(run: FakeRun) -> list[str]:
    assert isinstance(run.listener, NotingListener)
    return run.listener.events


async def finish(run: FakeRun, pool: FakePool | None = None) -> None:
    """Run to the end; nothing is left running."""
    training = run.assemble(num_held_out=5)
    if pool is not None:
        training.scorer.pool = pool
    try:
        await training.run()
    finally:
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1


def test_every_token_is_of_the_version_that_the_evaluation_began_with(groups: list[Sequence[ScoredGroup]]) -> None:
    run = run_of(threshold=1.0)
    asyncio.run(finish(run))
    assert [step for step, _ in run.listener.evaluations] == [0, 3, 6]  # the last one is awaited
    for of_step, step in zip(groups, (0, 3, 6), strict=True):
        samples = [one for group in of_step for one in group.trajectories]
        assert [len(one.weight_versions) for one in samples] == [6] * 10
        assert {version for one in samples for version in one.weight_versions} == {step}


def test_training_goes_on_beside_and_the_wait_for_the_weights_is_measured() -> None:
    run = run_of(threshold=1.0)
    asyncio.run(finish(run))
    events = events_of(run)
    first = {what: next(span for span in run.timeline.spans if span.what == what) for what in ("train", "evaluate")}
    assert first["train"].start_s < first["evaluate"].end_s, "training waited for an evaluation"
    during = events[events.index("begin") : events.index("evaluation 0")]
    assert {"training sample", "held-out sample"} <= set(during)
    waits = [span for span in run.timeline.spans if span.what == "wait for evaluation"]
    assert {span.who for span in waits} == {"trainer"}
    evaluated = [metrics for _, metrics in run.listener.evaluations]
    waited_s = sum(span.end_s - span.start_s for span in waits)
    assert (
        0.5 * waited_s < sum(metrics["wait_s"] for metrics in evaluated) <= waited_s
    )  # told before the last wait ends
    assert all(0 < metrics["wait_s"] <= metrics["seconds"] for metrics in evaluated)
    assert "evaluation" in {span.who for span in run.timeline.spans if span.what == "evaluate"}


def test_on_policy_the_world_stops() -> None:
    run = run_of(threshold=0.0)
    asyncio.run(finish(run))
    events = events_of(run)
    for step in (0, 3, 6):
        end = events.index(f"evaluation {step}")
        begin = max(place for place in range(end) if events[place] == "begin")
        assert set(events[begin + 1 : end]) == {"held-out sample"}
        assert f"step {step + 1}" not in events[:end]
    assert all(0 < metrics["wait_s"] <= metrics["seconds"] for _, metrics in run.listener.evaluations)


def test_in_deterministic_mode_training_has_the_same_batches_with_and_without_evaluation() -> None:
    settings: dict[str, Any] = {"rollout": {"deterministic": True, "max_batch_prompts": 1, "workflow": "single_turn"}}
    runs = [run_of(0.0, every_steps=1, **settings) for _ in range(2)]
    runs[1].job = runs[1].job.model_copy(update={"evaluation": None})
    asked = []
    for run in runs:
        asyncio.run(finish(run))
        calls = [call for rollout in run.rollouts for call in rollout.calls]
        asked.append([[(one.prompt_ids, one.seeds) for one in call] for call in calls if call[0].log_probs])
        assert all(sealed for rollout in run.rollouts for sealed in rollout.sealed)
    assert asked[0] == asked[1]
    assert [len(run.listener.evaluations) for run in runs] == [7, 0]


def test_an_aim_stops_the_world_too() -> None:
    run = run_of(1.0, evaluation=evaluation_section(3, temperature=HELD_OUT, stop_at_exact_match=0.5))
    asyncio.run(finish(run))
    assert events_of(run)[-1] == "evaluation 6"
    assert not any(event.startswith("training") for event in events_of(run)[: events_of(run).index("evaluation 0")])


def test_the_next_evaluation_waits_for_the_one_before() -> None:
    run = run_of(threshold=1.0, every_steps=1)
    asyncio.run(finish(run, SlowPool(lambda _: 1.0)))
    told = [event for event in events_of(run) if event.startswith(("begin", "evaluation"))]
    assert told == [event for step in range(7) for event in ("begin", f"evaluation {step}")]
    assert all(metrics["wait_s"] > 0 for _, metrics in run.listener.evaluations)


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_a_reward_that_fails_ends_the_job_and_names_the_sample(threshold: float) -> None:
    pool = SlowPool(lambda _: 1.0)
    pool.fails = True
    with pytest.raises(RewardError, match=r"sample sums/\d-\d raised KeyError"):
        asyncio.run(finish(run_of(threshold), pool))


def test_a_worker_that_fails_ends_the_job() -> None:
    run = run_of(threshold=1.0)
    run.rollouts[1] = Noting(1, [], RolloutError("the engine has died"))
    with pytest.raises(RolloutError, match="has died"):
        asyncio.run(finish(run))


def test_a_workflow_that_hangs_is_named() -> None:
    limits: dict[str, Any] = {"rollout": {"workflow_timeout_s": 0.05}}
    with pytest.raises(StuckError, match=r"sample sums/\d-\d"):
        asyncio.run(finish(run_of(1.0, workflow="NeverEnds", **limits)))
