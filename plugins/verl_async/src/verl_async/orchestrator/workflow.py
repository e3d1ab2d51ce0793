"""How a prompt becomes trajectories: what a workflow is given, and what it returns. Imports neither torch nor numpy."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

from verl_async.references import load
from verl_async.workflow_names import WORKFLOWS
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_async.config import RolloutConfig
    from verl_async.data.prompts import Prompt
    from verl_async.references import Loaded
    from verl_async.rollout.interface import FinishReason, Generation, SamplingParams


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What was written behind a prompt; trained on as one sequence."""

    turns: tuple[Generation | tuple[int, ...], ...]
    """In order: what the model generated, and the tokens that others wrote in between, which are not in the loss."""

    @property
    def generations(self) -> list[Generation]:
        """The model's turns."""
        return [turn for turn in self.turns if not isinstance(turn, tuple)]

    @property
    def token_ids(self) -> list[int]:
        """All tokens behind the prompt."""
        return list(chain.from_iterable(turn if isinstance(turn, tuple) else turn.token_ids for turn in self.turns))

    @property
    def in_loss(self) -> list[bool]:
        """For each of `token_ids`, whether the model drew it."""
        parts = ((False, turn) if isinstance(turn, tuple) else (True, turn.token_ids) for turn in self.turns)
        return [drawn for drawn, tokens in parts for _ in tokens]

    @property
    def log_probs(self) -> list[float]:
        """Of the tokens that the model drew."""
        return list(chain.from_iterable(one.log_probs for one in self.generations))

    @property
    def weight_versions(self) -> list[int]:
        """Of the tokens that the model drew."""
        return list(chain.from_iterable(one.weight_versions for one in self.generations))

    @property
    def finish_reason(self) -> FinishReason:
        """How the model's last turn ended."""
        return self.generations[-1].finish_reason


class WorkflowClient(Protocol):
    """What a workflow may ask for, on behalf of one sample."""

    sample_id: str
    """Names the sample, in messages."""
    sampling: SamplingParams
    """The job's; ``max_new_tokens`` is for all tokens behind the prompt, as the model has positions for no more."""

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_new_tokens: int | None = None,
        stop_strings: tuple[str, ...] = (),
        goes_on: bool = False,
    ) -> Generation:
        """Have the model go on behind some tokens, with a random stream of its own for each call; one call at a time.

        Args:
            token_ids: the whole context.
            max_new_tokens: by default the job's.
            stop_strings: texts that end the turn, beside the job's own stop tokens.
            goes_on: whether the next call begins with these tokens and the new ones; the engine may keep what it read.
        """

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode what was generated, without special tokens."""

    def reply_tokens(self, reply: str | list[dict[str, Any]], last: Generation) -> tuple[int, ...]:
        """Return the tokens of a reply to a generation, and of what opens the model's next turn behind it.

        Args:
            reply: a text, which stands as it is; or messages for the chat template.
            last: the generation; the reply closes its turn where the model did not.
        """


class Workflow(Protocol):
    """Made once, and called for each sample of each prompt, many at once."""

    async def run(self, prompt: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> Sequence[Trajectory]:
        """Return one trajectory or several; each gets a reward of its own, and takes part in the prompt's group.

        Args:
            prompt: a row of the prompt file.
            token_ids: its tokens.
            client: generates for this sample.
        """


class SingleTurn:
    """One response."""

    async def run(self, _: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> list[Trajectory]:
        """Generate it."""
        return [Trajectory((await client.generate(token_ids),))]


def load_workflow(config: RolloutConfig) -> Loaded:
    """Make the workflow that a job names.

    Raises:
        ConfigError: it cannot be imported or made, a setting is wrong, or it is none.
    """
    loaded = load(config.workflow, WORKFLOWS, config.workflow_config, "rollout.workflow")
    if not inspect.iscoroutinefunction(getattr(loaded.made, "run", None)):
        raise ConfigError(
            f"rollout.workflow={config.workflow}: expected a class with the method async run(prompt, token_ids, client)"
        )
    return loaded
