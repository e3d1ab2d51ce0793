"""From tokens to rewards."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_async.asynchrony.samples import ScoredGroup
from verl_async.data.tokenization import decode_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_async.asynchrony.samples import Draw
    from verl_async.data.rewards import Reward
    from verl_async.rollout.interface import Generation


@dataclass(frozen=True, slots=True)
class Scorer:
    """Decodes answers and scores them, in a thread: a user's function may take its time."""

    reward: Reward
    tokenizer: PreTrainedTokenizerBase

    async def score(self, draw: Draw, generations: list[Generation], num_interruptions: int = 0) -> ScoredGroup:
        """Score the samples of one draw.

        Raises:
            RewardError: the reward function failed or took too long; names the sample.
        """
        return await asyncio.to_thread(self._score, draw, generations, num_interruptions)

    def _score(self, draw: Draw, generations: list[Generation], num_interruptions: int) -> ScoredGroup:
        prompt = draw.encoded.prompt
        answers = [decode_response(self.tokenizer, generation.token_ids) for generation in generations]
        return ScoredGroup(
            draw=draw,
            generations=tuple(generations),
            rewards=tuple(
                self.reward.score(prompt, answer, draw.sample_id(place)) for place, answer in enumerate(answers)
            ),
            exact=tuple(self.reward.is_exact(prompt, answer) for answer in answers),
            num_interruptions=num_interruptions,
        )
