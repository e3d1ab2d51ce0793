"""Fully-async training: the trainer's loop beside the dispatcher."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from verl_async.orchestrator.idle_note import idle_note
from verl_async.orchestrator.waiting import beside, task_group

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from verl_async.config import TrainJob
    from verl_async.orchestrator.dispatcher import Dispatcher
    from verl_async.orchestrator.evaluation import Evaluation
    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.policy_update import PolicyUpdate
    from verl_async.orchestrator.rollout_worker import RolloutWorker
    from verl_async.orchestrator.sample_queue import SampleQueue
    from verl_async.orchestrator.samples import ScoredGroup
    from verl_async.orchestrator.scoring import Scorer
    from verl_async.orchestrator.staleness import StalenessBudget
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.orchestrator.weight_sync import WeightSync


@dataclass(slots=True)
class AsyncTraining:
    """The running job; see ``docs/explanation/fully-async.md``."""

    job: TrainJob
    workers: Sequence[RolloutWorker]
    dispatcher: Dispatcher
    queue: SampleQueue
    budget: StalenessBudget
    update: PolicyUpdate
    weights: WeightSync
    scorer: Scorer
    evaluation: Evaluation | None
    timeline: Timeline
    listener: JobListener
    _stale_samples: int = field(default=0, init=False)
    _partial_samples: int = field(default=0, init=False)

    async def run(self) -> None:
        """Train to the end; the first failure of any loop ends them all.

        Raises:
            EngineError: from whichever loop failed.
        """
        async with self.scorer.pool:
            await beside(self._train(), self.dispatcher.run(), *(worker.serve() for worker in self.workers))
        idle = self.timeline.idle_ratio("trainer"), self.timeline.idle_ratio("rollouter")
        if note := idle_note(*idle, self.dispatcher.waited_s, self.job.async_training):
            self.listener.on_note(note)

    async def _train(self) -> None:
        async with task_group() as evaluations:
            await self._take_steps(evaluations)

    async def _take_steps(self, evaluations: asyncio.TaskGroup) -> None:
        """Collect, update, sync, report; step after step."""
        config, num_steps = self.job.async_training, self.job.trainer.steps
        await self._sync()
        if await self._go_on(0, evaluations):
            return
        for step in range(1, num_steps + 1):
            started, num_waiting = time.monotonic(), len(self.queue)
            groups = await self._collect(config.require_batches * self.job.trainer.mini_batch_size)
            version = self.weights.version
            with self.timeline.span("trainer", "train"):
                since_sync = (step - 1) % config.trigger_parameter_sync_step
                metrics = {"queue_size": float(num_waiting), **await self.update.run(groups, since_sync)}
            syncs = step % config.trigger_parameter_sync_step == 0 or step == num_steps
            if syncs:
                await self._sync()
            self._report(step, groups, version, metrics, time.monotonic() - started)
            if syncs and await self._go_on(step, evaluations):
                return

    async def _collect(self, count: int) -> list[ScoredGroup]:
        """Take groups from the queue, in the order in which their prompts were drawn."""
        with self.timeline.span("trainer", "wait for samples"):
            # Each worker and each workflow goes on within its limit, and all samples that they have are scored at once.
            num_scored = self.job.rollout.n * self.job.rollout.max_batch_prompts * len(self.workers)
            rollout = self.job.rollout
            timeout_s = rollout.timeout_s + rollout.workflow_timeout_s + self.job.reward.longest_s(num_scored)
            if self.evaluation is not None and self.evaluation.is_running:
                timeout_s += self.evaluation.timeout_s  # it takes room at the workers
            groups = await self.queue.take(count, timeout_s)
        self.budget.trained(count)
        return sorted(groups, key=lambda group: group.instance.number)

    async def _sync(self) -> None:
        if self.evaluation is not None:
            await self.evaluation.generated()
        with self.timeline.span("trainer", "sync weights"):
            await self.weights.run()

    async def _go_on(self, step: int, evaluations: asyncio.TaskGroup) -> bool:
        """Begin an evaluation where it is due, and have prompts rolled out; return whether training is at its aim."""
        evaluation, num_steps = self.evaluation, self.job.trainer.steps
        if evaluation is not None and await evaluation.begin(step, num_steps, evaluations):
            return True
        self.budget.synced()
        return False

    def _report(
        self, step: int, groups: list[ScoredGroup], version: int, metrics: dict[str, float], seconds: float
    ) -> None:
        kept = [group for group in groups if not group.is_dropped]
        self._stale_samples += sum(group.oldest_version < version for group in kept)
        self._partial_samples += sum(group.is_partial for group in kept)
        tokens = metrics.pop("trained_tokens")
        self.listener.on_step(
            step,
            self.job.trainer.steps,
            metrics
            | self.scorer.metrics(groups)
            | group_metrics(kept, version)
            | {
                "tokens_per_s": tokens / seconds,
                "seconds": seconds,
                "weight_version": float(self.weights.version),
                "trainer/idle_ratio": self.timeline.idle_ratio("trainer"),
                "rollouter/idle_ratio": self.timeline.idle_ratio("rollouter"),
                "fully_async/count/stale_samples_processed": float(self._stale_samples),
                "fully_async/partial/total_partial_num": float(self._partial_samples),
            },
        )


def group_metrics(groups: Sequence[ScoredGroup], version: int) -> dict[str, float]:
    """Summarize what was sampled.

    Args:
        groups: of one training step, without those that were dropped.
        version: of the weights that the rollout workers had when the step began; staleness counts from it.
    """
    if not groups:
        return {}
    trajectories = [one for group in groups for one in group.trajectories]
    staleness = [version - group.oldest_version for group in groups]
    return {
        "response_tokens": fmean(sum(one.in_loss) for one in trajectories),
        "truncated_ratio": fmean(one.finish_reason == "length" for one in trajectories),
        "staleness_mean": fmean(staleness),
        "staleness_max": float(max(staleness)),
        "fully_async/partial/max_partial_span": float(
            max(group.newest_version - group.oldest_version for group in groups)
        ),
    }
