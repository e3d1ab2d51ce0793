"""The whole job on fakes: what is trained on, by which weights, and how it ends."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.verl_async.tests.fake_rollout import STOP, FakeRollout
from plugins.verl_async.tests.fakes import (
    FakeListener,
    FakeRun,
    FakeTexts,
    FakeTrainer,
    evaluation_section,
    make_group,
    train_job,
)
from verl_async.errors import RewardError
from verl_async.orchestrator.async_training import group_metrics
from verl_async.orchestrator.staleness import prompts_between_syncs
from verl_engine.contract.errors import StuckError, TrainingDivergedError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.config import TrainJob
    from verl_async.orchestrator.actors import BucketDelivery
    from verl_async.orchestrator.async_training import AsyncTraining
    from verl_async.rollout.interface import Acknowledgement, Generation, GenerationRequest, PauseMode


def watch_staleness(training: AsyncTraining, job: TrainJob) -> None:
    """Check after each grant that no more was started than the last sync allows."""
    budget, acquire = training.budget, training.budget.acquire
    limit = prompts_between_syncs(job.async_training, job.trainer.mini_batch_size)
    per_sync = (
        job.async_training.trigger_parameter_sync_step
        * job.async_training.require_batches
        * job.trainer.mini_batch_size
    )

    async def checked(at_most: int | None = None) -> range:
        numbers = await acquire(at_most)
        assert training.weights.version >= 0, "started before the first sync"
        assert budget.num_started <= per_sync * training.weights.version + limit
        return numbers

    budget.acquire = checked  # type: ignore[method-assign]


class Unequal(FakeRollout):
    """Answers of different lengths, so that workers and groups overtake each other."""

    def length(self, request: GenerationRequest) -> int:
        return 1 + request.seeds[0] % 6


@settings(max_examples=60, deadline=None)
@given(
    threshold=st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]),
    sync_step=st.integers(1, 3),
    require_batches=st.integers(1, 3),
    size=st.integers(1, 3),
    num_steps=st.integers(1, 5),
    queue_size=st.sampled_from([None, 1, 2, 7]),
    num_workers=st.integers(1, 3),
    max_batch_prompts=st.integers(1, 5),
    partial=st.booleans(),
    every_steps=st.sampled_from([None, 1]),
    num_samples=st.integers(1, 3),
)
def test_no_combination_loses_a_prompt_or_waits_for_ever(**drawn: Any) -> None:
    job = train_job(
        rollout={"max_batch_prompts": drawn["max_batch_prompts"], "num_workers": drawn["num_workers"]},
        trainer={"num_steps": drawn["num_steps"], "mini_batch_size": drawn["size"]},
        async_training={
            "staleness_threshold": drawn["threshold"],
            "trigger_parameter_sync_step": drawn["sync_step"],
            "require_batches": drawn["require_batches"],
            "queue_size": drawn["queue_size"],
            "partial_rollout": drawn["partial"],
        },
        evaluation=evaluation_section(drawn["every_steps"] and drawn["sync_step"], num_samples=drawn["num_samples"]),
    )
    run = FakeRun(job, rollouts=[Unequal(index) for index in range(drawn["num_workers"])])
    num_syncs = -(-drawn["num_steps"] // drawn["sync_step"])

    async def main() -> None:
        training = run.assemble()
        watch_staleness(training, job)
        await asyncio.wait_for(training.run(), 20.0)
        assert len(training.queue) == 0, "rolled out what nobody trains on"
        assert training.weights.version == num_syncs
        assert len(asyncio.all_tasks()) <= 2  # this one, and before Python 3.12 wait_for's

    asyncio.run(main())
    per_step = drawn["require_batches"] * drawn["size"]
    assert sorted(run.instances) == list(range(per_step * drawn["num_steps"])), "each draw is trained on exactly once"
    assert [len(groups) for groups in run.groups] == [per_step] * drawn["num_steps"]
    assert run.trainer.num_steps == drawn["require_batches"] * drawn["num_steps"]
    assert all(rollout.version == num_syncs for rollout in run.rollouts)
    for step, (groups, metrics) in enumerate(zip(run.groups, run.listener.steps, strict=True)):
        in_force = step // drawn["sync_step"]
        numbers = [group.instance.number for group in groups]
        assert numbers == sorted(numbers)
        assert max(group.newest_version for group in groups) <= in_force
        if drawn["threshold"] == 0:
            assert {group.oldest_version for group in groups} == {in_force}, "not the version in force"
            assert metrics["staleness_max"] == 0
        if drawn["queue_size"]:
            assert metrics["queue_size"] <= drawn["queue_size"]


def test_recomputed_log_probs_are_of_the_last_weight_sync() -> None:
    job = train_job(
        trainer={"num_steps": 5},
        async_training={"trigger_parameter_sync_step": 2, "require_batches": 2},
        algorithm={"old_log_probs": "recompute"},
    )
    run = FakeRun(job)
    asyncio.run(run.run())
    # Two optimizer steps a training step, a sync after every fourth.
    for step, batches in enumerate(run.trainer.batches):
        synced_at = step // 4 * 4
        for one in (one for share in batches for group in share for one in group):
            assert one.fields["old_log_probs"].tolist() == (-one.token_ids - 1000.0 * synced_at).tolist()


def stale_job(**changes: Any) -> TrainJob:
    """Eight steps of two prompts, one more step may be rolled out ahead."""
    sections = {
        "trainer": {"num_steps": 8},
        "async_training": {"staleness_threshold": 1.0},
        "rollout": {"max_batch_prompts": 1},
    }
    return train_job(**{name: sections.get(name, {}) | changes.get(name, {}) for name in {*sections, *changes}})


def test_partial_rollouts_go_on_with_the_tokens_they_have() -> None:
    run = FakeRun(stale_job(), rollouts=[FakeRollout(index, token_s=0.002, num_tokens=8) for index in range(2)])
    asyncio.run(run.run())
    partial = [group for groups in run.groups for group in groups if group.is_partial]
    assert partial, "no generation was interrupted"
    assert run.listener.steps[-1]["fully_async/partial/total_partial_num"] == len(partial)
    for group in (group for groups in run.groups for group in groups):
        first = group.instance.encoded.token_ids[0] + 1
        for answer in group.trajectories:
            assert answer.token_ids == [*range(first, first + 7), STOP]
            assert answer.log_probs == [-1.0 - place for place in range(8)]
            assert len(answer.weight_versions) == 8
            assert all(earlier <= later for earlier, later in pairwise(answer.weight_versions))
    assert max(group.newest_version - group.oldest_version for group in partial) >= 1


def test_without_partial_rollouts_nothing_is_interrupted() -> None:
    job = stale_job(async_training={"staleness_threshold": 1.0, "partial_rollout": False})
    run = FakeRun(job, rollouts=[FakeRollout(index, token_s=0.001, num_tokens=8) for index in range(2)])
    asyncio.run(run.run())
    assert {mode for rollout in run.rollouts for mode in rollout.pauses} == {"wait"}
    groups = [group for groups in run.groups for group in groups]
    assert not any(group.is_partial for group in groups)
    assert all(group.oldest_version == group.newest_version for group in groups)
    stale = run.listener.steps[-1]["fully_async/count/stale_samples_processed"]
    by_step = [(step, group) for step, groups in enumerate(run.groups) for group in groups]
    assert stale == sum(group.oldest_version < step for step, group in by_step)
    assert stale > 0, "nothing was rolled out ahead"


def test_figures_of_a_step_worked_by_hand() -> None:
    """On-policy: two steps of two prompts, each answered twice with three tokens after a prompt of two."""
    run = FakeRun(train_job(async_training={"staleness_threshold": 0.0}))
    asyncio.run(run.run())
    first, second = run.listener.steps
    seconds, speed = second.pop("seconds"), second.pop("tokens_per_s")
    assert speed == pytest.approx(4 * 5 / seconds)
    idle = second.pop("trainer/idle_ratio"), second.pop("rollouter/idle_ratio")
    assert all(0 <= ratio < 1 for ratio in idle)
    assert second == {
        "ratio": 3.0,
        "loss": 2.0,
        "grad_norm": 0.5,
        "learning_rate": 0.2,
        "step_applied": 1.0,
        "reward": 5.0,  # len("31 32")
        "reward/length": 5.0,
        "exact_match": 1.0,
        "response_tokens": 3.0,
        "truncated_ratio": 0.0,
        "staleness_mean": 0.0,
        "staleness_max": 0.0,
        "fully_async/partial/max_partial_span": 0.0,
        "queue_size": 0.0,
        "weight_version": 2.0,
        "fully_async/count/stale_samples_processed": 0.0,
        "fully_async/partial/total_partial_num": 0.0,
    }
    assert first["weight_version"] == 1.0
    assert {span.what for span in run.timeline.spans if span.who == "trainer"} >= {"train", "sync weights"}


def test_figures_of_groups_worked_by_hand() -> None:
    groups = [make_group(0, (0.0, 1.0), (3, 3)), make_group(1, (2.0, 5.0), (1, 2)), make_group(2, (0.0, 0.0), (2, 3))]
    metrics = group_metrics(groups, version=3)
    assert metrics == {
        "response_tokens": 2.0,
        "truncated_ratio": 0.0,
        "staleness_mean": 1.0,  # 0, 2 and 1 versions behind
        "staleness_max": 2.0,
        "fully_async/partial/max_partial_span": 1.0,  # one answer under versions 1 and 2, another under 2 and 3
    }


def test_a_step_in_which_every_group_was_left_out_is_reported_too() -> None:
    run = FakeRun(train_job(algorithm={"drop_uniform_groups": True}))
    asyncio.run(run.run())
    assert [metrics["step_applied"] for metrics in run.listener.steps] == [0.0, 0.0]
    assert [metrics["tokens_per_s"] for metrics in run.listener.steps] == [0.0, 0.0]
    assert run.trainer.num_steps == 0


def test_groups_that_cannot_be_scored_are_counted_and_training_goes_on() -> None:
    run = FakeRun(train_job(), texts=FakeTexts(lambda text: None if text.startswith("11") else 1.0))
    asyncio.run(run.run())
    lost, whole = run.listener.steps
    assert (lost["scoring/errors"], lost["scoring/dropped_samples"], lost["scoring/dropped_groups"]) == (2.0, 2.0, 1.0)
    assert (whole["scoring/errors"], whole["scoring/dropped_groups"]) == (0.0, 0.0)
    assert [len(batch[0][0]) for batch in run.trainer.batches] == [2, 4]
    assert "warning: sample 0-1 failed: the sample leaves its group" in run.listener.statuses
    nothing = FakeRun(train_job(), texts=FakeTexts(lambda _: None))
    asyncio.run(nothing.run())
    assert [metrics["scoring/dropped_groups"] for metrics in nothing.listener.steps] == [2.0, 2.0]
    assert nothing.trainer.num_steps == 0


def test_evaluations_come_at_both_ends_and_training_stops_at_its_aim() -> None:
    run = FakeRun(train_job(evaluation=evaluation_section()))
    asyncio.run(run.run())
    assert [step for step, _ in run.listener.evaluations] == [0, 2]
    stopped = FakeRun(train_job(evaluation=evaluation_section(stop_at_exact_match=0.5)))
    asyncio.run(stopped.run())
    assert [step for step, _ in stopped.listener.evaluations] == [0]
    assert stopped.listener.steps == []


class FailingTrainer(FakeTrainer):
    """Fails in its third step."""

    async def train_batch(self, *args: Any) -> Any:
        if self.num_steps == 2:
            raise TrainingDivergedError("the gradient was not finite")
        return await super().train_batch(*args)


class FailingRollout(FakeRollout):
    """Fails at a chosen place, from version 2 of the weights on."""

    def __init__(self, index: int, where: str) -> None:
        super().__init__(index, token_s=0.001)
        self.where = where

    def fail(self, where: str) -> None:
        if where == self.where and self.version >= 2:
            raise WeightsError(f"{self.name} fails in {where}")

    async def draw(self, row: Generation, request: GenerationRequest) -> None:
        self.fail("generate")
        await super().draw(row, request)

    async def load_bucket(self, delivery: BucketDelivery) -> None:
        self.fail("load")
        await super().load_bucket(delivery)

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        self.fail("commit")
        return await super().commit_weights(version)


class FailingListener(FakeListener):
    """Cannot write its file any more."""

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        super().on_step(step, num_steps, metrics)
        if step == 3:
            raise OSError("no space left")


def fail_on(text: str) -> float:
    if text.startswith("51"):
        raise KeyError(text)
    return 1.0


def failing_run(where: str) -> FakeRun:
    run = FakeRun(stale_job(), rollouts=[FakeRollout(index, token_s=0.001) for index in range(3)])
    if where == "train":
        run.trainer = FailingTrainer()
    elif where == "reward":
        run.texts = FakeTexts(fail_on)
    elif where == "listener":
        run.listener = FailingListener()
    elif where == "generate":  # all: which of them gets to it is chance
        run.rollouts = [FailingRollout(index, where) for index in range(3)]
    else:
        run.rollouts[1] = FailingRollout(1, where)
    return run


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        ("train", TrainingDivergedError, "the gradient was not finite"),
        ("generate", WeightsError, r"rollouter-\d fails in generate"),
        ("load", WeightsError, "rollouter-1 fails in load"),
        ("commit", WeightsError, "rollouter-1 fails in commit"),
        ("reward", RewardError, r"sample 4-[01] \(prompt row 4\) raised KeyError"),
        ("listener", OSError, "no space left"),
    ],
)
def test_the_first_failure_of_any_loop_ends_all_and_is_what_is_raised(
    where: str, kind: type[Exception], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = failing_run(where)

    async def main() -> None:
        training = run.assemble()
        with pytest.raises(kind, match=message):
            await training.run()
        assert len(asyncio.all_tasks()) == 1
        assert not any(rollout.generating for rollout in run.rollouts)

    asyncio.run(main())
    assert len(run.groups) < 8
    assert caplog.text == ""


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.03])
def test_a_cancelled_job_ends_all_its_loops(after_s: float) -> None:
    """As Ctrl-C does."""
    run = FakeRun(stale_job(), rollouts=[FakeRollout(index, token_s=0.002) for index in range(2)])

    async def main() -> None:
        training = run.assemble()
        running = asyncio.ensure_future(training.run())
        await asyncio.sleep(after_s)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert running.cancelled()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


class Stuck(FakeRollout):
    """Never answers once version 1 is in force."""

    async def draw(self, row: Generation, request: GenerationRequest) -> None:
        await asyncio.sleep(100 if self.version == 1 else 0)
        await super().draw(row, request)

    async def pause(self, mode: PauseMode) -> None:
        await asyncio.sleep(100 if self.version == 1 else 0)
        await super().pause(mode)


def test_a_stuck_worker_is_named_by_whoever_waits_for_it_first() -> None:
    job = stale_job(rollout={"max_batch_prompts": 1, "timeout_s": 0.3}, weight_sync={"timeout_s": 5.0})
    run = FakeRun(job, rollouts=[FakeRollout(0, token_s=0.001), Stuck(1, token_s=0.001)])
    with pytest.raises(StuckError, match=r"rollouter-1 did not finish generating any of 2 samples within 0\.3 s"):
        asyncio.run(run.run())


def raise_key_error(_: str) -> NoReturn:
    raise KeyError


def test_a_failure_before_the_first_step() -> None:
    run = FakeRun(train_job(), texts=FakeTexts(raise_key_error))
    with pytest.raises(RewardError, match="sample 0-0"):
        asyncio.run(run.run())
    assert run.trainer.num_steps == 0
