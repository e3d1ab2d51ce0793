"""Texts that end a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

_SPARE: Final = 8
"""Tokens decoded beyond those that a stop string can have: the first may start in the middle of a character."""


class StopStrings:
    """Looks for stop strings in the text of the last tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._strings = strings
        # A token has at least one byte of text, but for special ones, which no stop string holds.
        self._num_tokens = max(len(string.encode()) for string in strings) + _SPARE

    def is_complete(self, token_ids: list[int]) -> bool:
        """Tell whether the text of the drawn tokens holds a stop string."""
        text = cast(str, self._tokenizer.decode(token_ids[-self._num_tokens :]))
        return any(string in text for string in self._strings)
