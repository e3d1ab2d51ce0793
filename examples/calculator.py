"""An environment with a calculator, which works out what the model writes as ``47+85=``; and the reward for its use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

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


def solved(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:  # noqa: ARG001
    """Return 1.0 where the response is the answer, or ends in the calculator's reply to the right sum; else 0.0."""
    return float(solution_str == ground_truth or solution_str.endswith(f"={extra_info['a'] + extra_info['b']}"))
