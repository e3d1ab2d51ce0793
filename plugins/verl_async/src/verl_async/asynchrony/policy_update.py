"""One training step: the optimizer steps over the groups that were collected."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from verl_async.algorithms.policy_loss import ClippedPolicyLoss
from verl_async.asynchrony.batches import SharePlan, build_sequences, with_old_log_probs
from verl_async.asynchrony.waiting import within

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.asynchrony.actors import Trainer
    from verl_async.asynchrony.samples import ScoredGroup
    from verl_async.config import AlgorithmConfig, TrainerConfig
    from verl_engine.batch.sequence import Sequence
    from verl_engine.engine.train_step import StepReport

_SYNCED: Final = "synced"
"""Tag of the weights that the rollout workers were given last."""


@dataclass(frozen=True, slots=True)
class PolicyUpdate:
    """Turns scored groups into optimizer steps, one for each mini-batch."""

    trainer: Trainer
    config: TrainerConfig
    algorithm: AlgorithmConfig
    temperature: float
    """Of the rollouts: the policy that is trained is the one that was sampled."""
    sync_step: int = 1
    """Training steps between two weight syncs."""

    async def run(self, groups: list[ScoredGroup], since_sync: int = 0) -> Mapping[str, float]:
        """Train on the groups of one training step.

        Args:
            groups: require_batches * mini_batch_size of them, sorted by draw.
            since_sync: training steps made since the last weight sync.
        Returns:
            Figures of the step, means over its optimizer steps; without those of the loss if every group was left out.
        """
        size = self.config.mini_batch_size
        mini_batches = [
            build_sequences(groups[start : start + size], self.algorithm) for start in range(0, len(groups), size)
        ]
        mini_batches = [sequences for sequences in mini_batches if sequences]
        if self.algorithm.old_log_probs == "recompute":
            # All before the first update: the ratio is against the weights of the last sync, which are those in force
            # in the first training step after it.
            if since_sync == 0 and self.sync_step > 1:
                await self._keep_weights()
            tag = _SYNCED if since_sync else None
            mini_batches = [await self._add_old_log_probs(sequences, tag) for sequences in mini_batches]
        return _mean_figures([await self._train(sequences) for sequences in mini_batches])

    @property
    def loss(self) -> ClippedPolicyLoss:
        """The loss as configured."""
        cap = self.algorithm.importance_cap if self.algorithm.old_log_probs == "recompute" else None
        return ClippedPolicyLoss(self.algorithm.clip_low, self.algorithm.clip_high, cap)

    def _plan(self, sequences: list[Sequence]) -> SharePlan:
        return SharePlan.of(sequences, self.trainer.num_shares, self.config.max_tokens_per_micro_batch)

    async def _train(self, sequences: list[Sequence]) -> StepReport:
        return await within(
            self.config.timeout_s,
            f"the trainer did not finish an optimizer step over {len(sequences)} sequences",
            self.trainer.train_batch(self._plan(sequences).pick(sequences), self.loss, self.temperature),
        )

    async def _keep_weights(self) -> None:
        await within(
            self.config.timeout_s,
            "the trainer did not keep the weights of the last sync aside",
            self.trainer.keep_weights(_SYNCED),
        )

    async def _add_old_log_probs(self, sequences: list[Sequence], tag: str | None) -> list[Sequence]:
        plan = self._plan(sequences)
        results = await within(
            self.config.timeout_s,
            f"the trainer did not compute the log-probs of {len(sequences)} sequences",
            self.trainer.infer_batch(plan.pick(sequences), self.temperature, tag),
        )
        return with_old_log_probs(sequences, plan.restore(results))


def _mean_figures(reports: list[StepReport]) -> dict[str, float]:
    """Average what the optimizer steps of one training step reported."""
    if not reports:
        return {"step_applied": 0.0, "trained_tokens": 0.0}
    figures = {name: fmean(report.metrics[name] for report in reports) for name in reports[0].metrics}
    return figures | {
        "loss": fmean(report.loss for report in reports),
        "grad_norm": fmean(report.optimizer.grad_norm for report in reports),
        "learning_rate": reports[-1].optimizer.learning_rate,
        "step_applied": fmean(report.optimizer.applied for report in reports),
        "trained_tokens": float(sum(report.num_tokens for report in reports)),
    }
