"""Waiting for others with a limit, and saying who did not answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Coroutine

T = TypeVar("T")


class TimeLimit:
    """A limit for several waits together."""

    def __init__(self, timeout_s: float) -> None:
        """Start the clock."""
        self._timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s

    async def within(self, who: str, what: Awaitable[T]) -> T:
        """Await something for as long as the limit still allows; see `within`."""
        task = asyncio.ensure_future(what)
        try:
            # Not wait_for: before Python 3.12 it forgets a cancellation that comes together with the result, and it
            # takes a TimeoutError of what it awaits for its own.
            await asyncio.wait({task}, timeout=max(0.0, self._end_s - time.monotonic()))
        except asyncio.CancelledError:
            await end(task)
            raise
        if not task.done():
            await end(task)
            raise StuckError(f"{who} within {self._timeout_s:g} s{_last_words(task)}")
        return task.result()


def _last_words(task: asyncio.Future[Any]) -> str:
    """Return what a cancelled wait says of those it still waited for, in brackets; see `verl_async.ray.answers`."""
    try:
        task.result()
    except asyncio.CancelledError as error:
        return f" ({error})" if str(error) else ""
    except Exception as error:  # noqa: BLE001 - whatever ended it in the last moment is part of the answer
        return f" ({error})"
    return ""


async def within(timeout_s: float, who: str, what: Awaitable[T]) -> T:
    """Await something for at most `timeout_s` seconds.

    Args:
        timeout_s: the limit.
        who: subject and verb of the error, such as ``trainer ranks 0, 1 did not finish an optimizer step``.
        what: cancelled when the limit passes; it has ended when this returns or raises.
    Raises:
        StuckError: the limit passed.
    """
    return await TimeLimit(timeout_s).within(who, what)


async def together(*parts: Awaitable[T]) -> list[T]:
    """Await all parts at once; the first failure cancels the others, and is raised when they have ended."""
    if len(parts) == 1:  # needs no task of its own
        return [await parts[0]]
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        await end(*tasks)
        raise


@asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """Open a group of tasks whose first failure ends all, and is raised as it is."""
    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except BaseExceptionGroup as failed:
        failure = failed.exceptions[0]
    if failure is not None:
        raise failure


async def beside(main: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]) -> T:
    """Await `main` while others run, which end with it; the first failure of any ends all, and is raised."""
    async with task_group() as tasks:
        leading, running = tasks.create_task(main), [tasks.create_task(one) for one in others]
        result = await leading
        for task in running:
            task.cancel()
    return result


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, however they do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
