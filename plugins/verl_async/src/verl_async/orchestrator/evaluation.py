"""How well the current weights answer held-out prompts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Final

from verl_async.orchestrator.lanes import SealedBatch, StreamLane
from verl_async.orchestrator.samples import Draw
from verl_async.orchestrator.waiting import together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.config import EvaluationConfig, RolloutConfig
    from verl_async.orchestrator.listener import JobListener
    from verl_async.orchestrator.rollout_worker import RolloutWorker
    from verl_async.orchestrator.sampler import Sampler
    from verl_async.orchestrator.samples import EncodedPrompt, ScoredGroup
    from verl_async.orchestrator.timeline import Timeline

SEED: Final = 0x6576616C
"""Apart from the training streams, and the same at each evaluation, so that only the weights differ."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One answer to each held-out prompt, from all rollout workers together."""

    prompts: Sequence[EncodedPrompt]
    workers: Sequence[RolloutWorker]
    sampler: Sampler
    timeline: Timeline
    listener: JobListener
    config: EvaluationConfig
    rollout: RolloutConfig

    def is_due(self, step: int, num_steps: int) -> bool:
        """Tell whether to evaluate after `step` training steps: at both ends, and in between as configured."""
        every = self.config.every_steps
        return step in (0, num_steps) or (every is not None and step % every == 0)

    async def run_and_report(self, step: int) -> bool:
        """Evaluate, tell the listener, and return whether training has reached its aim."""
        self.listener.on_status(f"evaluating on {len(self.prompts)} prompts")
        with self.timeline.span("trainer", "evaluate"):
            figures = await self.run()
        self.listener.on_evaluation(step, figures)
        self.listener.on_status("training")
        aim = self.config.stop_at_exact_match
        return aim is not None and figures.get("exact_match", 0.0) >= aim

    async def run(self) -> dict[str, float]:
        """Answer and score all prompts, beside what the workers generate for training.

        Returns:
            ``response_tokens``, and what `Scorer.figures` says: means over the samples that could be scored.
        """
        draws = [Draw(number, encoded) for number, encoded in enumerate(self.prompts)]
        shares = [draws[place :: len(self.workers)] for place in range(len(self.workers))]
        answered = await together(*map(self._answer, self.workers, shares))
        groups = [group for share in answered for group in share]
        figures = self.sampler.scorer.figures(groups)
        if lengths := [sum(one.in_loss) for group in groups for one in group.trajectories]:
            figures["response_tokens"] = fmean(lengths)
        return figures

    async def _answer(self, worker: RolloutWorker, draws: list[Draw]) -> list[ScoredGroup]:
        if not self.rollout.deterministic:
            return await together(*(self.sampler.group(draw, [StreamLane(worker)]) for draw in draws))
        size = self.rollout.max_batch_prompts * self.rollout.n  # as many sequences as in training
        groups = []
        for start in range(0, len(draws), size):
            batch = SealedBatch(worker)
            part = [(draw, [batch.lane()]) for draw in draws[start : start + size]]
            groups += await together(*(self.sampler.group(draw, lanes) for draw, lanes in part))
        return groups
