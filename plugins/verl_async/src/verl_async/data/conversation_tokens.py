"""A whole conversation as tokens, with a loss mask for each turn."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from verl_async.data.turns import end_of_turn, ids_behind
from verl_async.errors import DataError
from verl_engine.batch.sequence import Sequence
from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

    from verl_async.data.examples import Conversation

    Render = Callable[[list[dict[str, object]], bool], str]
    """Messages, and whether the model's turn is opened behind them, to text."""


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, render: Render, where: str
) -> Sequence:
    """Tokenize a conversation as the chat template writes it whole.

    Args:
        tokenizer: of the model.
        conversation: a row of the example file.
        render: fills in the chat template.
        where: field and row; for messages.
    Returns:
        The sequence; its loss mask is True on each trained turn behind what opens it, with the token that closes it.
    Raises:
        ModelError: the template ends turns by no token of its own.
        DataError: it writes a turn otherwise once the conversation goes on, so that what the model would see when it
            answers is not in the text.
    """
    end_id = end_of_turn(tokenizer)
    if end_id is None:
        raise ModelError(
            f"{where}: the chat template ends a turn by no token of its own, so where a turn ends cannot be learned; "
            "use the columns prompt and response, or a template with one"
        )
    closing = str(tokenizer.convert_ids_to_tokens(end_id))
    messages = conversation.messages
    text = render(messages, False)
    ids: list[int] = []
    in_loss: list[bool] = []
    done = 0

    def add(end: int, *, trained: bool) -> None:
        nonlocal done
        new = ids_behind(tokenizer, text[:done], ids, text[done:end], special_tokens=False) if end > done else []
        ids.extend(new)
        in_loss.extend([trained] * len(new))
        done = end

    for index in conversation.trained:
        add(_opening(messages, index, text, render, where), trained=False)
        content = str(messages[index]["content"] or "").strip()  # may hold the closing token's text itself
        at = text.find(content, done)
        found = text.find(closing, done if at < 0 else at + len(content))
        if found < 0:
            raise DataError(f"{where}: messages[{index}] does not end in {closing!r} as the chat template writes it")
        add(found + len(closing), trained=True)
    add(len(text), trained=False)
    return Sequence(np.array(ids, dtype=np.int64), np.array(in_loss))


def _opening(messages: list[dict[str, object]], index: int, text: str, render: Render, where: str) -> int:
    """Return where a turn's own text begins: behind what the template writes to open the model's turn."""
    before, opened = render(messages[:index], False), render(messages[:index], True)
    if not text.startswith(before):
        raise DataError(
            f"{where}: the chat template writes what is before messages[{index}] otherwise once the conversation goes "
            "on, such as without thoughts; make an example of its own for each turn, or set train: false on this one"
        )
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, opened, strict=False)))
