"""The workflow ``multi_turn``: a conversation of the model with an environment of the user's, such as a tool."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic import Field

from verl_async.orchestrator.workflow import Trajectory
from verl_async.references import load_reference, make, split_reference
from verl_engine.contract.bounded import Count
from verl_engine.contract.errors import ConfigError
from verl_engine.contract.strict_model import StrictModel

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from verl_async.data.prompts import Prompt
    from verl_async.orchestrator.workflow import WorkflowClient
    from verl_async.rollout.interface import Generation

_AT = "rollout.workflow_config.environment"


class Environment(Protocol):
    """What the model talks to; an object for each sample. Runs in the job's own process, so it must not block."""

    def reset(self, prompt: Prompt) -> Awaitable[None] | None:
        """Begin a conversation; async where that has to wait for anything."""

    async def step(self, response: str) -> str | list[dict[str, Any]] | None:
        """Reply to a turn of the model.

        Args:
            response: its text, without special tokens.
        Returns:
            A text, where the prompt is one; messages such as ``[{"role": "tool", "content": "4"}]``, where it is a
            chat; or None to end the conversation.
        """


class MultiTurnConfig(StrictModel):
    """Settings of ``multi_turn``."""

    environment: str = Field(min_length=1)
    """``module:attribute`` of an `Environment` class."""
    environment_config: dict[str, Any] = Field(default_factory=dict)
    """Settings for the ``Config`` of the environment, where it has one."""
    max_turns: Count = 8
    """Of the model."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a turn of the model, such as what closes a call of a tool; its end of text does too."""


class MultiTurn:
    """Turns of model and environment, until the environment ends it or ``rollout.max_response_tokens`` are used up."""

    Config = MultiTurnConfig

    def __init__(self, config: MultiTurnConfig) -> None:
        """Find the environment.

        Raises:
            ConfigError: it cannot be imported or made, or has no ``reset`` and async ``step``.
        """
        self.features = ("stop_strings",) if config.stop_strings else ()
        """What the rollout engine must be able to do."""
        self._config = config
        place = f"{_AT}={config.environment}"
        try:
            split_reference(config.environment)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from None
        found = load_reference(config.environment, place, "class")
        self._make = partial(make, found, config.environment_config, place, f"{_AT}_config")
        made = self._make()
        if not (callable(getattr(made, "reset", None)) and inspect.iscoroutinefunction(getattr(made, "step", None))):
            raise ConfigError(f"{place}: expected a class with the methods reset(prompt) and async step(response)")

    async def run(self, prompt: Prompt, token_ids: tuple[int, ...], client: WorkflowClient) -> list[Trajectory]:
        """Have one conversation."""
        environment = cast("Environment", self._make())
        if inspect.isawaitable(waited := environment.reset(prompt)):
            await waited
        context = list(token_ids)
        turns: list[Generation | tuple[int, ...]] = []
        num_left = client.sampling.max_new_tokens
        for turn in range(self._config.max_turns):
            stop = self._config.stop_strings
            found = await client.generate(context, max_new_tokens=num_left, stop_strings=stop, goes_on=True)
            turns.append(found)
            num_left -= len(found.token_ids)
            if found.finish_reason == "length" or turn == self._config.max_turns - 1:
                break
            reply = await environment.step(client.text(found.token_ids))
            if reply is None:
                break
            tokens = client.reply_tokens(reply, found)
            num_left -= len(tokens)
            if num_left < 1:
                break  # what the model would say to it has no room
            turns.append(tokens)
            context += [*found.token_ids, *tokens]
        return [Trajectory(tuple(turns))]
