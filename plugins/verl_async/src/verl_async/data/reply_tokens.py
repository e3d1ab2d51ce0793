"""The tokens of what others say between two turns of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from verl_async.data.turns import end_of_turn, ids_behind, text_ids
from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedTokenizerBase

_TURN: Final = "Answer7"
"""Stands for the model's turn."""


def reply_tokens(
    tokenizer: PreTrainedTokenizerBase,
    reply: str | list[dict[str, Any]],
    last_token: int,
    settings: Mapping[str, Any],
) -> tuple[int, ...]:
    """Return the tokens that follow a turn of the model: of the reply, and of what opens the next turn.

    Args:
        tokenizer: of the model.
        reply: a text, which stands as it is; or messages, which the chat template writes.
        last_token: of the model's turn; where it is the one with which the template ends a turn, that does not come
            again.
        settings: arguments for the chat template.
    Raises:
        ModelError: the template does not take the messages, or writes the turn before them otherwise,
            or does not end it as it ends the last turn of a chat.
    """
    if isinstance(reply, str):
        before, behind = _TURN, reply
    else:
        chat = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _TURN}, *reply]
        try:
            text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **settings))
        except Exception as error:  # a template may raise anything
            raise ModelError(f"the chat template does not take the reply {reply!r}: {error}") from error
        head, found, behind = text.partition(_TURN)
        if not found:
            raise ModelError("the chat template leaves out the model's turn where a reply follows")
        before = head + found
        closing = end_of_turn(tokenizer)
        if closing is not None and last_token == closing:
            mark = str(tokenizer.convert_ids_to_tokens(closing))
            space, found, rest = behind.partition(mark)
            if not found or space.strip():  # else the mark may be one behind the reply
                raise ModelError(f"the chat template does not end the model's turn in {mark!r} where a reply follows")
            before, behind = before + space + mark, rest
    before_ids = text_ids(tokenizer, before, special_tokens=False)
    return tuple(ids_behind(tokenizer, before, before_ids, behind, special_tokens=False))
