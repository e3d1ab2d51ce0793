"""The columns ``prompt``, a text or a chat as a list of messages, and ``messages``, a whole conversation."""

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
    messages = _read_messages(row, "prompt", prompt)
    if messages[-1]["role"] == "assistant":
        raise row.error(
            f"prompt[{len(messages) - 1}].role",
            "assistant",
            "the last message to be another's: the model's turn is opened behind it (what it shall say is `response`)",
        )
    return messages


def read_messages_column(row: Row) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """Return a row's conversation, and which of its messages are trained on.

    Those are the assistant's, without those that say ``train: false``; the key itself is taken out.

    Raises:
        DataError: it is no conversation, holds nothing, or nothing to train on.
    """
    column = row.get("messages", "a list of messages {role: ..., content: ...}")
    if not isinstance(column, list):
        raise row.error("messages", column, "a list of messages {role: ..., content: ...}")
    messages = _read_messages(row, "messages", column)
    trained = []
    for index, message in enumerate(messages):
        is_assistant = message["role"] == "assistant"
        flag = message.pop("train", is_assistant)
        if not isinstance(flag, bool) or (flag and not is_assistant):
            expected = "true or false" if is_assistant else "false: only the assistant's turns are trained on"
            raise row.error(f"messages[{index}].train", flag, expected)
        if flag:
            trained.append(index)
    if 0 in trained:
        raise row.error("messages[0].role", "assistant", "another's message first, which the model answers")
    if not trained:
        raise row.error("messages", column, "at least one message of the assistant that is trained on")
    return messages, tuple(trained)


def _read_messages(row: Row, column: str, values: list[Any]) -> list[dict[str, Any]]:
    messages = [_read_message(row, f"{column}[{position}]", message) for position, message in enumerate(values)]
    if not any(_says_something(message["content"]) for message in messages):
        raise row.error(column, values, "one that is not empty: messages {role: ..., content: ...}")
    return messages


def _read_message(row: Row, column: str, message: object) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise row.error(column, message, "a message {role: ..., content: ...}")
    values: dict[str, Any] = _without_nulls(message)
    role, content = values.get("role"), _one_text(values.get("content"))
    if not isinstance(role, str) or not role:
        raise row.error(f"{column}.role", role, "a text such as 'user'")
    # A message that only calls tools says nothing: then content is null.
    if not isinstance(content, str) and not (content is None and values.get("tool_calls")):
        raise row.error(f"{column}.content", content, "a text, or one part {type: text, text: ...}")
    return {**values, "content": content}


def _without_nulls(value: Any) -> Any:
    """Drop each key with null from mappings, however deep.

    Parquet gives every mapping each key that any row has there, as null; to a chat template that is not the same as its
    absence. JSONL is read alike, so that a row is the same prompt in both formats.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _one_text(content: object) -> object:
    """Return the text of content that is one part of text; templates for text alone would print a list as Python does.

    Several parts are not joined: templates differ in what they put between them.
    """
    match content:
        case [{"type": "text", "text": str(text), **more}] if not more:
            return text
        case _:
            return content


def _says_something(content: str | None) -> bool:
    return bool(content and content.strip())
