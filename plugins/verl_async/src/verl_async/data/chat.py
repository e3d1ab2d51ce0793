"""The ``prompt`` column: a text, or a chat as a list of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_async.data.rows import Row

_EXPECTED = "a text, or a list of messages {role: ..., content: ...}"


def read_prompt_column(row: Row) -> str | list[dict[str, Any]]:
    """Return a row's prompt.

    Raises:
        DataError: it is neither a text nor a chat, or holds nothing.
    """
    prompt = row.get("prompt", _EXPECTED)
    if isinstance(prompt, str):
        if not prompt.strip():
            raise row.error("prompt", prompt, f"one that is not empty: {_EXPECTED}")
        return prompt
    if not isinstance(prompt, list):
        raise row.error("prompt", prompt, _EXPECTED)
    messages = [_read_message(row, position, message) for position, message in enumerate(prompt)]
    if not any(_says_something(message["content"]) for message in messages):
        raise row.error("prompt", prompt, f"one that is not empty: {_EXPECTED}")
    return messages


def _read_message(row: Row, position: int, message: object) -> dict[str, Any]:
    column = f"prompt[{position}]"
    if not isinstance(message, dict):
        raise row.error(column, message, "a message {role: ..., content: ...}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise row.error(f"{column}.role", role, "a text such as 'user'")
    # A message that only calls tools says nothing: then content is null.
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise row.error(f"{column}.content", content, "a text")
    # Parquet gives every message each key that any message has, as null; to a chat template that is not the same as
    # its absence.
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _says_something(content: object) -> bool:
    return bool(content.strip() if isinstance(content, str) else content)
