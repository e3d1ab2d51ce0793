"""Reading supervised examples."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from verl_async.data.examples import Conversation, Example, read_examples
from verl_async.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

CHAT = [{"role": "user", "content": "1+2="}]


def write_jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_reads_texts_and_chats(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "e.jsonl", {"prompt": "1+2=", "response": "3"}, {"prompt": CHAT, "response": " 3 "})
    assert read_examples(path, "data.examples") == [Example(0, "1+2=", "3"), Example(1, CHAT, " 3 ")]


def test_reads_parquet(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([{"prompt": CHAT, "response": "3", "more": 1}] * 3), path)
    assert read_examples(path, "data.examples", limit=2) == [Example(0, CHAT, "3"), Example(1, CHAT, "3")]


TURNS = [*CHAT, {"role": "assistant", "content": "4"}, *CHAT, {"role": "assistant", "content": "3"}]


def test_reads_conversations_with_what_is_trained_on(tmp_path: Path) -> None:
    first = {**TURNS[1], "train": False}
    rows: list[dict[str, Any]] = [{"messages": TURNS}, {"messages": [{**CHAT[0], "train": False}, first, *TURNS[2:]]}]
    path = write_jsonl(tmp_path / "e.jsonl", *rows)
    assert read_examples(path, "data.examples") == [Conversation(0, TURNS, (1, 3)), Conversation(1, TURNS, (3,))]
    table = tmp_path / "e.parquet"  # there every message has every key
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), table)
    assert read_examples(table, "data.examples") == read_examples(path, "data.examples")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1+2="}, "no column 'response'; columns found: 'prompt'; expected 'response', a text"),
        ({"response": "3"}, "no column 'prompt'"),
        ({"prompt": "1+2=", "response": ""}, "response is ''; expected a text that is not empty"),
        ({"prompt": "1+2=", "response": 3}, "response is 3; expected a text that is not empty"),
        ({"messages": TURNS, "prompt": "1"}, "prompt is '1'; expected nothing beside messages"),
        ({"messages": "1+2="}, "messages is '1+2='; expected a list of messages"),
        ({"messages": []}, "messages is []; expected one that is not empty"),
        ({"messages": CHAT}, f"messages is {CHAT}; expected at least one message of the assistant"),
        ({"messages": [{**CHAT[0], "train": True}]}, "messages[0].train is True; expected false: only the assistant's"),
        ({"messages": [CHAT[0], {**TURNS[1], "train": 1}]}, "messages[1].train is 1; expected true or false"),
        ({"messages": TURNS[1:]}, "messages[0].role is 'assistant'; expected another's message first"),
        ({"prompt": "", "response": "3"}, "prompt is ''; expected one that is not empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write_jsonl(tmp_path / "e.jsonl", {"prompt": "1", "response": "2"}, row)
    with pytest.raises(DataError, match=re.escape(f"data.examples={path}, line 2: {message}")):
        read_examples(path, "data.examples")
