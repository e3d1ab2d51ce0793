"""From tokens to rewards, sample by sample."""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import TYPE_CHECKING, Final, Protocol, Self

from verl_async.data.rewards import Sample
from verl_async.data.tokenization import decode_response
from verl_async.orchestrator.samples import ScoredGroup
from verl_async.orchestrator.timeline import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

    from verl_async.data.reward_pool import Score
    from verl_async.orchestrator.samples import PromptInstance
    from verl_async.orchestrator.timeline import Timeline
    from verl_async.orchestrator.workflow import Trajectory

_MOST_SHOWN: Final = 20
"""Failed samples that are shown one by one; all are counted."""


class Pool(Protocol):
    """Scores samples; see `verl_async.data.reward_pool.RewardPool`."""

    async def __aenter__(self) -> Self:
        """Open it."""

    async def __aexit__(self, *error: object) -> None:
        """Close it."""

    async def score(self, sample: Sample) -> Score:
        """Score one sample."""


@dataclass(slots=True)
class Scorer:
    """Decodes responses and has them scored, any number at once."""

    pool: Pool
    tokenizer: PreTrainedTokenizerBase
    say: Callable[[str], None]
    """Told which samples could not be scored."""
    timeline: Timeline
    """Told when it scores, as ``scoring``."""
    data_sources: frozenset[str] = frozenset()
    """Of all prompts of the job."""
    _num_calls: int = field(default=0, init=False)
    _since_s: float = field(default=0.0, init=False)
    _num_errors: int = field(default=0, init=False)

    async def score(self, instance: PromptInstance, sample_id: str, trajectory: Trajectory) -> Score:
        """Score one trajectory, as soon as it is there.

        Args:
            instance: the prompt.
            sample_id: names the trajectory.
            trajectory: its text is scored whole, with what others wrote between the model's turns.
        Raises:
            RewardError: a reward function failed and ``reward.on_error`` is ``stop``; names the sample.
        """
        text = decode_response(self.tokenizer, trajectory.token_ids)
        with self._noted():
            score = await self.pool.score(Sample(instance.encoded.prompt, text, sample_id))
        for error in score.errors:
            self._num_errors += 1
            cost = "the sample leaves its group" if score.reward is None else "this score counts as 0"
            if self._num_errors <= _MOST_SHOWN:
                self.say(f"warning: {error}: {cost}")
            if self._num_errors == _MOST_SHOWN:
                self.say(
                    f"warning: {_MOST_SHOWN} rewards have failed; further ones are only counted, in scoring/errors"
                )
        return score

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Have the timeline know when any sample is being scored."""
        if not self._num_calls:
            self._since_s = self.timeline.now_s
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1
            now_s = self.timeline.now_s
            self.timeline.record(Span("scoring", "score", self._since_s, now_s))
            self._since_s = now_s

    def metrics(
        self, groups: Iterable[ScoredGroup], more: Callable[[ScoredGroup], Iterable[tuple[str, float]]] = lambda _: ()
    ) -> dict[str, float]:
        """Average what the reward functions say of some groups, and count what failed.

        Args:
            groups: to average over.
            more: names and values of further metrics of a group, which are averaged too.
        Returns:
            ``reward``, ``exact_match``, and ``reward/KEY`` for each other number that a function returned: means over
            the samples that have it. Where the job has several data sources, also of each, behind
            ``data_source/SOURCE/``. Once a reward has failed: ``scoring/errors``, ``scoring/dropped_samples`` and
            ``scoring/dropped_groups``.
        """
        groups = list(groups)
        values: defaultdict[str, list[float]] = defaultdict(list)
        for group in groups:
            for name, value in chain(_metrics_of(group), more(group)):
                values[name].append(value)
                if len(self.data_sources) > 1:
                    values[f"data_source/{group.instance.encoded.prompt.data_source}/{name}"].append(value)
        metrics = {name: _mean(numbers) for name, numbers in values.items()}
        if self._num_errors:
            metrics["scoring/errors"] = float(sum(group.num_errors for group in groups))
            metrics["scoring/dropped_samples"] = float(sum(group.num_dropped for group in groups))
            metrics["scoring/dropped_groups"] = float(sum(group.is_dropped for group in groups))
        return metrics


def finished_group(
    instance: PromptInstance, trajectories: Sequence[Trajectory], scores: Sequence[Score]
) -> ScoredGroup:
    """Put a group together when its last sample is scored; samples without a reward leave it."""
    kept = [place for place, score in enumerate(scores) if score.reward is not None]
    return ScoredGroup(
        instance=instance,
        trajectories=tuple(trajectories[place] for place in kept),
        rewards=tuple(reward for score in scores if (reward := score.reward) is not None),
        exact=tuple(scores[place].is_exact for place in kept),
        metrics=tuple(scores[place].metrics for place in kept),
        num_errors=sum(len(score.errors) for score in scores),
        num_dropped=len(scores) - len(kept),
    )


def _mean(values: list[float]) -> float:
    return fmean(values) if all(map(math.isfinite, values)) else math.nan


def _metrics_of(group: ScoredGroup) -> Iterator[tuple[str, float]]:
    for reward, exact, metrics in zip(group.rewards, group.exact, group.metrics, strict=True):
        yield "reward", reward
        yield "exact_match", float(exact)
        for key, value in metrics.items():
            yield f"reward/{key}", value
