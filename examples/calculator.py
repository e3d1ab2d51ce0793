"""An environment with a calculator: what the model writes as ``47+85=`` is worked out for it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_async.data.prompts import Prompt


class Calculator:
    """Replies to a turn that ends in a sum with the number, and ends the conversation otherwise."""

    def reset(self, prompt: Prompt) -> None:
        """Begin; the calculator needs nothing of the prompt."""

    async def step(self, response: str) -> str | None:
        """Return the sum at the end of a turn."""
        call = re.search(r"(\d+)\+(\d+)=$", response)
        return str(int(call[1]) + int(call[2])) if call else None
