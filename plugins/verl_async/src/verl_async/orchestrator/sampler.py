"""From a prompt to a scored group."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from verl_async.data.reply_tokens import reply_tokens
from verl_async.data.tokenization import NO_SETTINGS, decode_response
from verl_async.errors import WorkflowError
from verl_async.orchestrator.scoring import finished_group
from verl_async.orchestrator.waiting import together
from verl_async.orchestrator.workflow import Trajectory
from verl_async.rollout.interface import GenerationRequest
from verl_engine.contract.errors import EngineError, StuckError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_async.data.reward_pool import Score
    from verl_async.orchestrator.lanes import Lane
    from verl_async.orchestrator.samples import PromptInstance, ScoredGroup
    from verl_async.orchestrator.scoring import Scorer
    from verl_async.orchestrator.workflow import Workflow
    from verl_async.rollout.interface import Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class Sampler:
    """Runs the workflow for each sample of a prompt, and has each trajectory scored as soon as it is there."""

    workflow: Workflow
    scorer: Scorer
    sampling: SamplingParams
    seed: int
    chat_settings: Mapping[str, Any] = field(default_factory=lambda: NO_SETTINGS)
    """Arguments for the chat template."""
    timeout_s: float = 60.0
    """Of ``rollout.workflow_timeout_s``."""
    held_out: str = ""
    """Name of the evaluation set it samples for; empty for training."""
    with_experts: bool = False
    """Whether generations for training are to say through which experts their tokens went."""

    async def group(self, instance: PromptInstance, lanes: Sequence[Lane]) -> ScoredGroup:
        """Return the group when its last trajectory is scored.

        Args:
            instance: the prompt.
            lanes: one for each sample; closed when it is generated.
        Raises:
            WorkflowError: the workflow raised, or returned no trajectories; names the sample.
            StuckError: it waited too long for something else than the model; names the sample.
            EngineError: a worker failed, or a sample could not be scored.
        """
        samples = await together(*(self._sample(instance, place, lane) for place, lane in enumerate(lanes)))
        trajectories, scores = zip(*chain.from_iterable(samples), strict=True)
        return finished_group(instance, trajectories, scores)

    async def _sample(self, instance: PromptInstance, place: int, lane: Lane) -> list[tuple[Trajectory, Score]]:
        client = _Client(self, instance, place, lane)
        try:
            trajectories = await self._run(instance, client)
        finally:
            lane.close()
        names = [client.sample_id + (f".{index}" if index else "") for index in range(len(trajectories))]
        scores = await together(*(self.scorer.score(instance, *one) for one in zip(names, trajectories, strict=True)))
        return list(zip(trajectories, scores, strict=True))

    async def _run(self, instance: PromptInstance, client: _Client) -> list[Trajectory]:
        where = f"rollout.workflow: sample {client.sample_id} (prompt {instance.encoded.prompt.row})"
        try:
            async with client.limit:
                found: object = await self.workflow.run(instance.encoded.prompt, instance.encoded.token_ids, client)
        except EngineError:
            raise
        except Exception as error:
            if client.limit.expired():
                raise StuckError(
                    f"{where} did not go on within {self.timeout_s:g} s (rollout.workflow_timeout_s), while it waited "
                    "for no turn of the model"
                ) from error
            raise WorkflowError(f"{where} raised {type(error).__name__}: {error}") from error
        trajectories = list(found) if isinstance(found, Sequence) else []
        if not trajectories or not all(isinstance(one, Trajectory) and one.weight_versions for one in trajectories):
            raise WorkflowError(
                f"{where} returned {found!r:.200}; expected a list of Trajectory, each with a turn of the model"
            )
        return trajectories


class _Client:
    """A `WorkflowClient`."""

    def __init__(self, sampler: Sampler, instance: PromptInstance, place: int, lane: Lane) -> None:
        # A worker must not take a conversation of an evaluation for one of training.
        self.sample_id = "/".join(filter(None, (sampler.held_out, instance.sample_id(place))))
        self.sampling = sampler.sampling
        self._sampler = sampler
        self._instance = instance
        self._place = place
        self._lane = lane
        self._num_calls = 0
        self._num_running = 0
        self.limit = asyncio.timeout(sampler.timeout_s)
        """Of what the workflow waits for between two calls of `generate`."""
        self._last: tuple[int, ...] = ()
        """What the model read and wrote in the last call."""

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._sampler.scorer.tokenizer

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_strings: tuple[str, ...] = (),
        goes_on: bool = False,
    ) -> Generation:
        seed = self._instance.seed(self._sampler.seed, self._place, self._num_calls)
        self._num_calls += 1
        sampling = self.sampling  # one object for all requests travels once with them
        if max_new_tokens is not None or stop_strings:
            num_new = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens
            sampling = replace(sampling, max_new_tokens=num_new, stop_strings=stop_strings)
        key, context = self.sample_id if goes_on else "", tuple(token_ids)
        trains = not self._sampler.held_out  # engines need not give log-probs under every setting
        experts_from = None
        if self._sampler.with_experts and trains:
            # The generation of the call before says those of what it read, all but its last token.
            is_next = goes_on and self._last and context[: len(self._last)] == self._last
            experts_from = len(self._last) - 1 if is_next else 0
        request = GenerationRequest(
            context, sampling, (seed,), affinity_key=key, log_probs=trains, routed_experts_from=experts_from
        )
        self._num_running += 1
        self.limit.reschedule(None)  # the worker has a limit of its own
        try:
            found = await self._lane.generate(request)
        finally:
            self._num_running -= 1
            if not self._num_running:
                self.limit.reschedule(asyncio.get_running_loop().time() + self._sampler.timeout_s)
        if found.token_ids:
            self._last = (*context, *found.token_ids)
        return found

    def text(self, token_ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, list(token_ids))

    def reply_tokens(self, reply: str | list[dict[str, Any]], last: Generation) -> tuple[int, ...]:
        return reply_tokens(self._tokenizer, reply, last.token_ids[-1], self._sampler.chat_settings)
