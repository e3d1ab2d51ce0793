"""From a prompt to a scored group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_async.orchestrator.scoring import finished_group
from verl_async.orchestrator.waiting import together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.data.reward_pool import Score
    from verl_async.orchestrator.lanes import Lane
    from verl_async.orchestrator.samples import Draw, ScoredGroup
    from verl_async.orchestrator.scoring import Scorer
    from verl_async.rollout.interface import Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampler:
    """Generates the samples of a prompt, and has each scored as soon as it is there."""

    scorer: Scorer
    sampling: SamplingParams
    seed: int

    async def group(self, draw: Draw, lanes: Sequence[Lane]) -> ScoredGroup:
        """Return the group when its last sample is scored.

        Args:
            draw: the prompt.
            lanes: one for each sample; closed when it is generated.
        Raises:
            EngineError: a worker failed, or a sample could not be scored.
        """
        samples = await together(*(self._sample(draw, place, lane) for place, lane in enumerate(lanes)))
        generations, scores = zip(*samples, strict=True)
        return finished_group(draw, generations, scores)

    async def _sample(self, draw: Draw, place: int, lane: Lane) -> tuple[Generation, Score]:
        try:
            generation = await lane.generate(draw.request(place, self.sampling, self.seed))
        finally:
            lane.close()
        return generation, await self.scorer.score(draw, place, generation)
