"""Supervised training: batches in, optimizer steps out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_async.algorithms.sft_loss import sft_loss
from verl_async.data.order import Mix
from verl_async.orchestrator.batches import BatchPlan
from verl_async.orchestrator.waiting import beside, task_group, within

if TYPE_CHECKING:
    import asyncio

    from verl_async.config import SftJob
    from verl_async.orchestrator.actors import Trainer
    from verl_async.orchestrator.evaluation import Evaluation
    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.orchestrator.weight_sync import WeightSync
    from verl_engine.batch.sequence import Sequence
    from verl_engine.engine.train_step import StepReport


@dataclass(frozen=True, slots=True)
class SupervisedTraining:
    """The running job."""

    job: SftJob
    examples: list[Sequence]
    trainer: Trainer
    evaluation: tuple[Evaluation, WeightSync] | None
    """How to evaluate, and how the rollout workers that do it get the weights."""
    timeline: Timeline
    listener: JobListener
    mix: Mix | None = None
    """How the rows of several files are drawn; by default all alike."""

    async def run(self) -> None:
        """Train to the end, or until the evaluation has reached its aim."""
        if self.evaluation is None:
            return await self._run()
        evaluation, _ = self.evaluation
        async with evaluation.sets[0].sampler.scorer.pool:
            return await beside(self._run(), *(worker.serve() for worker in evaluation.workers))

    async def _run(self) -> None:
        async with task_group() as evaluations:
            await self._take_steps(evaluations)

    async def _take_steps(self, evaluations: asyncio.TaskGroup) -> None:
        order = (self.mix or Mix((len(self.examples),))).order(self.job.data.shuffle, self.job.data.seed)
        if await self._evaluate(0, evaluations):
            return
        for step in range(1, self.job.trainer.steps + 1):
            started = time.monotonic()
            with self.timeline.span("trainer", "train"):
                report = await self._train([self.examples[next(order)] for _ in range(self.job.trainer.batch_size)])
            self._report(step, report, time.monotonic() - started)
            if await self._evaluate(step, evaluations):
                return

    async def _train(self, batch: list[Sequence]) -> StepReport:
        config = self.job.trainer
        plan = BatchPlan.of(batch, self.trainer.data_parallel_size, config.max_tokens_per_micro_batch)
        return await within(
            config.timeout_s,
            f"the trainer did not finish an optimizer step over {len(batch)} examples",
            self.trainer.train_batch(plan.pick(batch), sft_loss, temperature=1.0),
        )

    async def _evaluate(self, step: int, evaluations: asyncio.TaskGroup) -> bool:
        if self.evaluation is None:
            return False
        evaluation, weights = self.evaluation
        if not evaluation.is_due(step, self.job.trainer.steps):
            return False
        await evaluation.generated()
        with self.timeline.span("trainer", "sync weights"):
            await weights.run()
        return await evaluation.begin(step, self.job.trainer.steps, evaluations)

    def _report(self, step: int, report: StepReport, seconds: float) -> None:
        self.listener.on_step(
            step,
            self.job.trainer.steps,
            {
                "loss": report.loss,
                "grad_norm": report.optimizer.grad_norm,
                "learning_rate": report.optimizer.learning_rate,
                "step_applied": float(report.optimizer.applied),
                "tokens_per_s": report.num_tokens / seconds,
                "seconds": seconds,
            },
        )
