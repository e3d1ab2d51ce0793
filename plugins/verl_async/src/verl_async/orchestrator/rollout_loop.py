"""What keeps one rollout worker busy: draw prompts, generate, score, queue."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verl_async.orchestrator.waiting import within

if TYPE_CHECKING:
    from verl_async.config import RolloutConfig
    from verl_async.orchestrator.actors import RolloutWorker
    from verl_async.orchestrator.prompt_source import PromptSource
    from verl_async.orchestrator.sample_queue import SampleQueue
    from verl_async.orchestrator.samples import Draw
    from verl_async.orchestrator.scoring import Scorer
    from verl_async.orchestrator.staleness import StalenessBudget
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.rollout.interface import Generation, GenerationRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class RolloutLoop:
    """Runs beside training until every prompt of the job was rolled out."""

    worker: RolloutWorker
    num_workers: int
    source: PromptSource
    budget: StalenessBudget
    queue: SampleQueue
    scorer: Scorer
    timeline: Timeline
    config: RolloutConfig
    sampling: SamplingParams
    put_timeout_s: float
    """How long the queue may stay full."""

    async def run(self) -> None:
        """Fill the queue.

        Raises:
            StuckError: the worker or the trainer did not answer in time.
            RewardError: a sample could not be scored.
        """
        while True:
            with self.timeline.span(self.worker.name, "wait for trainer"):
                numbers = await self.budget.acquire(self.config.max_batch_prompts, self.num_workers)
            if not numbers:
                return
            draws = [self.source.draw(number) for number in numbers]
            for draw, (samples, num_interruptions) in zip(draws, await self._generate(draws), strict=True):
                with self.timeline.span(self.worker.name, "score"):
                    group = await self.scorer.score_group(draw, samples, num_interruptions)
                with self.timeline.span(self.worker.name, "wait for trainer"):
                    await self.queue.put(group, self.put_timeout_s)

    async def _generate(self, draws: list[Draw]) -> list[tuple[list[Generation], int]]:
        """Generate all samples of the draws; where a weight sync interrupts, go on with the tokens there are.

        Returns:
            For each draw its samples, and how many times one of them was interrupted.
        """
        size = self.config.n
        requests = [
            request for draw in draws for request in draw.requests(self.config.n, self.sampling, self.source.seed)
        ]
        generations = await self._generate_once(requests)
        num_interruptions = [0] * len(draws)
        while unfinished := [i for i, found in enumerate(generations) if found.finish_reason == "interrupted"]:
            for place in {index // size for index in unfinished}:
                num_interruptions[place] += 1
            rest = [replace(requests[index], so_far=(generations[index],)) for index in unfinished]
            for index, generation in zip(unfinished, await self._generate_once(rest), strict=True):
                generations[index] = generation
        groups = [generations[start : start + size] for start in range(0, len(generations), size)]
        return list(zip(groups, num_interruptions, strict=True))

    async def _generate_once(self, requests: list[GenerationRequest]) -> list[Generation]:
        async with AsyncExitStack() as stack:
            with self.timeline.span(self.worker.name, "wait for trainer"):
                client = await stack.enter_async_context(self.worker.using())
            with self.timeline.span(self.worker.name, "generate"):
                return await within(
                    self.config.timeout_s,
                    f"{self.worker.name} did not finish generating {len(requests)} samples",
                    client.generate(requests),
                )
