"""One training step: the optimizer steps over the groups that were collected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Final

from verl_async.algorithms.columns import OLD_LOG_PROBS, REF_LOG_PROBS, ROLLOUT_LOG_PROBS
from verl_async.orchestrator.batches import (
    BatchPlan,
    build_sequences,
    kl_of,
    with_advantages,
    with_column,
    without_fields,
)
from verl_async.orchestrator.waiting import within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from verl_async.algorithms.algorithm import Algorithm
    from verl_async.config import TrainerConfig
    from verl_async.orchestrator.actors import Trainer
    from verl_async.orchestrator.samples import ScoredGroup
    from verl_engine.batch.sequence import Sequence
    from verl_engine.engine.train_step import StepReport

_SYNCED: Final = "synced"
"""Tag of the weights that the rollout workers were given last."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Turns scored groups into optimizer steps, one for each mini-batch."""

    trainer: Trainer
    config: TrainerConfig
    algorithm: Algorithm
    temperature: float
    """Of the rollouts: the policy that is trained is the one that was sampled."""
    sync_step: int = 1
    """Training steps between two weight syncs."""
    with_experts: bool = False
    """Whether all forwards send tokens through the experts that the rollout's went through."""

    async def run(self, groups: list[ScoredGroup], since_sync: int = 0) -> Mapping[str, float]:
        """Train on the groups of one training step.

        Args:
            groups: require_batches * mini_batch_size of them, sorted by prompt instance.
            since_sync: training steps made since the last weight sync.
        Returns:
            Metrics of the step, means over its optimizer steps; without those of the loss if every group was left out.
        """
        tag = None
        if self.algorithm.config.old_log_probs == "recompute":
            # The ratio is against the weights of the last sync, which are the current ones in the first training step
            # after it.
            if since_sync == 0 and self.sync_step > 1:
                await self._keep_weights()
            tag = _SYNCED if since_sync else None
        size = self.config.mini_batch_size
        # All before the first update, for the same reason.
        mini_batches = [
            await self._prepared(groups[start : start + size], tag) for start in range(0, len(groups), size)
        ]
        reports = [await self._train(sequences) for sequences, _ in mini_batches if sequences]
        kl = [value for _, values in mini_batches for value in values]
        return _mean_metrics(reports) | ({"reward_kl": fmean(kl)} if kl else {})

    async def _prepared(self, groups: list[ScoredGroup], tag: str | None) -> tuple[list[Sequence], list[float]]:
        """Return what a mini-batch trains on, and the KL of each sequence where it is in the reward."""
        algorithm = self.algorithm
        wanted = (*algorithm.advantage_columns, *algorithm.loss.columns)
        sequences = build_sequences(groups, wanted, algorithm.config.old_log_probs, with_experts=self.with_experts)
        sequences = await self._with_log_probs(sequences, algorithm.advantage_columns, tag)
        kl: list[float] = []
        if algorithm.reward_kl is not None:
            kl = [kl_of(one, algorithm.reward_kl.estimator).mean().item() for one in sequences]
        sequences = with_advantages(groups, sequences, algorithm)
        sequences = await self._with_log_probs(sequences, algorithm.loss.columns, tag)
        unread = frozenset({ROLLOUT_LOG_PROBS, OLD_LOG_PROBS, *wanted} - set(algorithm.loss.columns))
        return without_fields(sequences, unread), kl

    async def _with_log_probs(
        self, sequences: list[Sequence], columns: Iterable[str], tag: str | None
    ) -> list[Sequence]:
        """Have the trainer compute those log-probs among the columns that are not there yet."""
        for name in (OLD_LOG_PROBS, REF_LOG_PROBS):
            if sequences and name in columns and name not in sequences[0].fields:
                sequences = await self._with_column(sequences, name, tag)
        return sequences

    def _plan(self, sequences: list[Sequence]) -> BatchPlan:
        return BatchPlan.of(sequences, self.trainer.data_parallel_size, self.config.max_tokens_per_micro_batch)

    async def _train(self, sequences: list[Sequence]) -> StepReport:
        return await within(
            self.config.timeout_s,
            f"the trainer did not finish an optimizer step over {len(sequences)} sequences",
            self.trainer.train_batch(
                self._plan(sequences).pick(sequences),
                self.algorithm.loss,
                self.temperature,
                self.algorithm.config.loss_normalizer,
            ),
        )

    async def _keep_weights(self) -> None:
        await within(
            self.config.timeout_s,
            "the trainer did not keep the weights of the last sync aside",
            self.trainer.keep_weights(_SYNCED),
        )

    async def _with_column(self, sequences: list[Sequence], name: str, tag: str | None) -> list[Sequence]:
        plan, of_reference = self._plan(sequences), name == REF_LOG_PROBS
        what = "log-probs of the reference policy for" if of_reference else "log-probs of"
        batches = plan.pick(sequences)
        infer = self.trainer.infer_reference if of_reference else partial(self.trainer.infer_batch, tag=tag)
        results = await within(
            self.config.timeout_s,
            f"the trainer did not compute the {what} {len(sequences)} sequences",
            infer(batches, self.temperature),
        )
        return with_column(sequences, name, plan.restore(results))


def _mean_metrics(reports: list[StepReport]) -> dict[str, float]:
    """Average what the optimizer steps of one training step reported."""
    if not reports:
        return {"step_applied": 0.0, "trained_tokens": 0.0}
    metrics = {name: fmean(report.metrics[name] for report in reports) for name in reports[0].metrics}
    return metrics | {
        "loss": fmean(report.loss for report in reports),
        "grad_norm": fmean(report.optimizer.grad_norm for report in reports),
        "learning_rate": reports[-1].optimizer.learning_rate,
        "step_applied": fmean(report.optimizer.applied for report in reports),
        "trained_tokens": float(sum(report.num_tokens for report in reports)),
    }
