"""What an engine says when it refuses, on a rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_engine.contract.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable


def message_of(attempt: Callable[[], object]) -> str:
    """Return the message that an attempt fails with; an empty one where it does not."""
    try:
        attempt()
    except (EngineError, OSError) as error:
        return str(error)
    return ""
