"""Waiting for others with a limit, and saying who did not answer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from verl_engine.contract.errors import StuckError

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")


async def within(timeout_s: float, who: str, what: Awaitable[T]) -> T:
    """Await something for at most `timeout_s` seconds.

    Args:
        timeout_s: the limit.
        who: subject and verb of the error, such as ``trainer ranks 0, 1 did not finish an optimizer step``.
        what: cancelled when the limit passes.
    Raises:
        StuckError: the limit passed.
    """
    try:
        return await asyncio.wait_for(what, timeout_s)
    except asyncio.TimeoutError as error:
        raise StuckError(f"{who} within {timeout_s:g} s") from error
