"""From tokens to rewards."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_async.asynchrony.samples import ScoredGroup
from verl_async.data.tokenization import decode_response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_async.asynchrony.samples import Draw
    from verl_async.data.reward_process import RewardProcess
    from verl_async.data.rewards import Reward
    from verl_async.rollout.interface import Generation


@dataclass(frozen=True, slots=True)
class Scorer:
    """Decodes answers and scores them, in a thread: a user's function may take its time.

    The thread is none of the event loop's: those are waited for when the loop ends, so Ctrl-C would take as long as the
    function still does for the rest of the group.
    """

    reward: Reward | RewardProcess
    tokenizer: PreTrainedTokenizerBase

    async def score(self, draw: Draw, generations: list[Generation], num_interruptions: int = 0) -> ScoredGroup:
        """Score the samples of one draw.

        Raises:
            RewardError: the reward function failed or took too long; names the sample.
        """
        scored: Future[ScoredGroup] = Future()
        scored.set_running_or_notify_cancel()
        cancelled = threading.Event()

        def run() -> None:
            try:
                scored.set_result(self._score(draw, generations, num_interruptions, cancelled))
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                scored.set_exception(error)

        threading.Thread(target=run, name=f"scoring of {draw.number}", daemon=True).start()
        try:
            return await asyncio.wrap_future(scored)
        finally:
            cancelled.set()

    def _score(
        self, draw: Draw, generations: list[Generation], num_interruptions: int, cancelled: threading.Event
    ) -> ScoredGroup:
        prompt = draw.encoded.prompt
        answers = [decode_response(self.tokenizer, generation.token_ids) for generation in generations]
        rewards = []
        for place, answer in enumerate(answers):
            if cancelled.is_set():
                raise asyncio.CancelledError
            rewards.append(self.reward.score(prompt, answer, draw.sample_id(place)))
        return ScoredGroup(
            draw=draw,
            generations=tuple(generations),
            rewards=tuple(rewards),
            exact=tuple(self.reward.is_exact(prompt, answer) for answer in answers),
            num_interruptions=num_interruptions,
        )
