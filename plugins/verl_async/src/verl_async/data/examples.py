"""Supervised examples: a prompt and the response to learn, or a whole conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_async.data.chat import read_messages_column, read_prompt_column
from verl_async.data.rows import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from verl_async.data.rows import Row

COLUMNS = ("prompt", "response", "messages")


@dataclass(frozen=True, slots=True)
class Example:
    """One supervised example."""

    index: int
    """Row in the file, counted from 0; blank lines do not count."""
    prompt: str | list[dict[str, Any]]
    """A text, or a chat as a list of messages ``{"role": ..., "content": ...}``."""
    response: str
    """What the model shall answer, without its closing token."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """One supervised example of several turns."""

    index: int
    """Row in the file, counted from 0; blank lines do not count."""
    messages: list[dict[str, Any]]
    """Of all roles, ``{"role": ..., "content": ...}``."""
    trained: tuple[int, ...]
    """Which of them are in the loss, ascending; all the assistant's."""


def read_examples(
    path: Path, field: str, limit: int | None = None, found: set[str] | None = None
) -> list[Example | Conversation]:
    """Read an example file.

    Args:
        path: Parquet or JSONL with columns ``prompt`` and ``response``, or ``messages``.
        field: dotted path of the config field that names the file, such as ``data.examples``; for messages.
        limit: only so many rows, from the first; the rest is not looked at.
        found: gets the names of all columns that the rows have.
    Raises:
        DataError: the file is missing, of another kind, empty or malformed; names the line (JSONL, from 1) or the row
            (Parquet, from 0).
    """
    return [_read_example(row) for row in read_rows(path, field, COLUMNS, limit, found)]


def _read_example(row: Row) -> Example | Conversation:
    if row.values.get("messages") is not None:
        for column in ("prompt", "response"):
            if row.values.get(column) is not None:
                raise row.error(column, row.values[column], "nothing beside messages, which say all")
        return Conversation(row.index, *read_messages_column(row))
    response = row.get("response", "a text")
    if not isinstance(response, str) or not response:
        raise row.error("response", response, "a text that is not empty")
    return Example(row.index, read_prompt_column(row), response)
