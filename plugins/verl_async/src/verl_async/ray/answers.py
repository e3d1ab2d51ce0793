"""Waiting for an actor's answer, and turning Ray's errors into ours."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from verl_engine.contract.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray import ObjectRef


class ActorError(EngineError):
    """A Ray actor died, or failed with an error that is not one of ours."""


async def answer(reference: ObjectRef[Any], who: str) -> Any:
    """Await an actor's result; the caller bounds the time.

    Raises:
        EngineError: what the actor raised, if it was one.
        ActorError: the actor died, or raised something else; names it.
    """
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, EngineError):
            raise cause from error
        raise ActorError(f"{who} failed: {type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        raise ActorError(
            f"{who} died: {error}. If the machine ran out of memory, lower trainer.max_tokens_per_micro_batch or "
            "rollout.max_batch_prompts"
        ) from error
    except RayError as error:
        raise ActorError(f"{who} could not be reached: {error}") from error


async def answers(references: Sequence[ObjectRef[Any]], names: Sequence[str]) -> list[Any]:
    """Await the results of several actors; the first failure is raised."""
    return list(await asyncio.gather(*map(answer, references, names)))
