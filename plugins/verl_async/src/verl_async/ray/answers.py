"""Waiting for an actor's answer, and turning Ray's errors into ours."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final

from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from verl_engine.contract.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ray import ObjectRef

_GRACE_S: Final = 2.0
"""How long to wait for the other failures: a rank whose peer died often fails first, and only says that it lost it."""


_LONGEST: Final = 240
"""Characters of Ray's that go into a message of ours."""


class ActorError(EngineError):
    """A Ray actor died, or failed with an error that is not one of ours."""


class ActorDiedError(ActorError):
    """The process of an actor is gone."""


async def answer(reference: ObjectRef[Any], who: str) -> Any:
    """Await an actor's result; the caller bounds the time.

    Raises:
        EngineError: what the actor raised, if it was one.
        ActorDiedError: its process is gone; names it.
        ActorError: it raised something else; names it.
    """
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, EngineError):
            raise cause from error
        raise ActorError(f"{who} failed: {type(cause).__name__}: {cause}") from error
    except (RayActorError, OutOfMemoryError) as error:
        raise ActorDiedError(
            f"{who} died{_reason(error)}. If the machine ran out of memory, lower "
            "trainer.max_tokens_per_micro_batch or rollout.max_batch_prompts"
        ) from error
    except RayError as error:
        raise ActorError(f"{who} could not be reached: {shortened(str(error))}") from error


async def answers(references: Sequence[ObjectRef[Any]], names: Sequence[str]) -> list[Any]:
    """Await the results of several actors.

    Raises:
        EngineError: the failure that says most about the cause, of those that came up soon after the first.
        CancelledError: it was cancelled; names those that had not answered, for the error of who set the limit.
    """
    waiting = [asyncio.ensure_future(answer(*pair)) for pair in zip(references, names, strict=True)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_EXCEPTION)
        failures = _failures(waiting)
        if failures and not isinstance(failures[0], ActorDiedError):
            await asyncio.wait(waiting, timeout=_GRACE_S)
            failures = _failures(waiting)
    except asyncio.CancelledError:
        silent = [name for name, one in zip(names, waiting, strict=True) if not one.done()]
        raise asyncio.CancelledError(f"no answer from {', '.join(silent)}") from None
    finally:
        for one in waiting:
            one.cancel()
    if failures:
        raise min(failures, key=_distance_from_cause)
    return [one.result() for one in waiting]


def _failures(waiting: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    failed = (one.exception() for one in waiting if one.done() and not one.cancelled())
    return [error for error in failed if error is not None]


def _distance_from_cause(error: BaseException) -> int:
    """A death explains the errors of others; an error of ours says what to do; the rest may be a lost connection."""
    if isinstance(error, ActorDiedError):
        return 0
    return 2 if isinstance(error, ActorError) else 1


def _reason(error: RayError) -> str:
    """Say which process it was, and what happened. Ray's page about a death tells of other processes too."""
    text = " ".join(str(error).split())
    process = re.search(r"\bpid: (\d+)", text)
    detail = text.partition("Worker exit detail: ")[2] or text
    happened = shortened(detail.partition(" Some common causes")[0].rstrip("."))
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        happened = "Ray ended it, for the machine ran low on memory"
    return f"{f' (process {process[1]})' if process else ''}: {happened}"


def shortened(text: str) -> str:
    """Keep the beginning of a text of Ray's; all of it is in the traceback."""
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
