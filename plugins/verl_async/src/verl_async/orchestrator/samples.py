"""What a prompt becomes on its way from the file to the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.data.prompts import Prompt
    from verl_async.orchestrator.workflow import Trajectory


_FEWEST: Final = 2
"""Samples that have advantages relative to each other."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A row of the prompt file with its tokens."""

    prompt: Prompt
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptInstance:
    """One prompt drawn for one group of samples."""

    number: int
    """Counts from 0 over the whole job: the same row drawn again has another number."""
    encoded: EncodedPrompt

    def seed(self, job_seed: int, place: int, call: int = 0) -> int:
        """Return the seed of a sample's random stream; with several calls of the model each has its own."""
        return stream_seed(job_seed, self.number, place, *([call] if call else []))

    def sample_id(self, place: int) -> str:
        """Name a sample, in messages and logs."""
        return f"{self.number}-{place}"


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """All trajectories of one prompt instance that could be scored."""

    instance: PromptInstance
    trajectories: tuple[Trajectory, ...]
    rewards: tuple[float, ...]
    exact: tuple[bool, ...]
    metrics: tuple[Mapping[str, float], ...] = ()
    """Other numbers of the rewards, by sample."""
    num_errors: int = 0
    """Calls of reward functions that failed."""
    num_dropped: int = 0
    """Samples that left the group as they could not be scored."""

    @property
    def is_dropped(self) -> bool:
        """Whether too few samples are left to compare: the group is counted, and not trained on."""
        return self.num_dropped > 0 and len(self.trajectories) < _FEWEST

    @property
    def is_partial(self) -> bool:
        """Whether a response stopped for new weights, and went on with them."""
        turns = (turn for one in self.trajectories for turn in one.generations)
        return any(turn.weight_versions[0] != turn.weight_versions[-1] for turn in turns)

    @property
    def oldest_version(self) -> int:
        """Version of the weights that drew its first token."""
        return min(min(one.weight_versions) for one in self.trajectories)

    @property
    def newest_version(self) -> int:
        """Version of the weights that drew its last token."""
        return max(max(one.weight_versions) for one in self.trajectories)


def stream_seed(*numbers: int) -> int:
    """Derive a 63-bit seed from a few non-negative numbers, each combination its own."""
    return int.from_bytes(blake2b("-".join(map(str, numbers)).encode(), digest_size=8).digest(), "little") >> 1
