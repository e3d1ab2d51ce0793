"""Broken prompt and example files, as JSONL and as Parquet."""

from __future__ import annotations

import datetime
import json
import random as random_numbers
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.cases import ChangedError, Findings
from verl_async.data.examples import read_examples
from verl_async.data.prompts import read_prompts
from verl_async.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path
    from random import Random

SCALARS: Final = (None, True, 0, -1, 10**12, 0.5, "", " ", "a", "é☃", "<s>", "\0", "x" * 300, "user", "text")
"""What JSON and Parquet can both hold, though not in one column."""
ARRAYS: Final = (
    lambda: pa.array([0, 1], pa.timestamp("ns")),
    lambda: pa.array([0, 2**62], pa.timestamp("us")),
    lambda: pa.array([0, 2**30], pa.date32()),
    lambda: pa.array([0, 2**62], pa.duration("us")),
    lambda: pa.array([datetime.date(1, 1, 1), None]),
    lambda: pa.array([b"a", b"\xff"]),
    lambda: pa.array([b"a", b"\xff"]).view(pa.string()),
    lambda: pa.StructArray.from_arrays([pa.array(["a", "b"])] * 2, names=["role", "role"]),
    lambda: pa.array([[("a", 1)], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
    lambda: pa.array(["a", "b"]).dictionary_encode(),
    lambda: pa.array([None, None]),
    lambda: pa.array([1.5, float("nan")]),
    lambda: pa.array([[{"role": "user", "content": "a"}], None]),
    lambda: pa.array([{"ground_truth": "1", "more": {"x": 1}}, {"ground_truth": "2", "more": {"y": 2}}]),
)
"""Columns that JSON could not hold, or that Python has no type for."""

JUNK: Final = (
    *(b"", b"\xff", b"\n", b'"', b"{", b"]", b"\\ud800", b"NaN", b"\0", b"\xef\xbb\xbf"),
    *(b"9" * 5000, b"[" * 2000),
)


def fuzz_data_files(findings: Findings, folder: Path, number: int, seed: int = 0) -> None:
    """Try a number of broken files, all from one seed.

    Args:
        findings: gets what came of them.
        folder: for the files; writable.
        number: of files.
        seed: of what is drawn.
    """
    random = random_numbers.Random(seed)
    ways = (_same_rows, _broken_lines, _strange_columns, _broken_bytes)
    while findings.counts["data_files"] < number:
        random.choice(ways)(findings, folder, random)


def _row(random: Random, *, broken: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "data_source": "sums",
        "prompt": random.choice(["1+1=", _chat(random)]),
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 3},
        "response": "2",
    }
    if broken and random.random() < 0.2:
        row = {"messages": [*_chat(random), {"role": "assistant", "content": "2", "train": random.random() < 0.5}]}
    for _ in range(random.randrange(3) if broken else 0):
        name = random.choice([*row, "images", "other", "messages"])
        match random.randrange(3):
            case 0:
                row.pop(name, None)
            case 1:
                row[name] = _anything(random, 0)
            case _:
                row[name] = _mutated(row.get(name), random)
    return row


def _chat(random: Random) -> list[dict[str, Any]]:
    """Make a chat with tool calls whose arguments differ: Parquet gives each all keys."""
    names = random.sample(["x", "y", "z"], random.randrange(3))
    arguments = {"w": "a"} | {name: random.choice(["a", "b", None]) for name in names}
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    asked = {"role": "user", "content": "1+1=", **({"name": "Ada"} if random.random() < 0.5 else {})}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [asked, called, {"role": "tool", "content": "2"}] if random.random() < 0.5 else [asked]


def _anything(random: Random, depth: int) -> Any:
    kind = random.randrange(6) if depth < 3 else 0
    if kind == 1:
        return [_anything(random, depth + 1) for _ in range(random.randrange(3))]
    if kind == 2:
        keys = ("role", "content", "type", "text", "ground_truth", "a", "")
        return {key: _anything(random, depth + 1) for key in random.sample(keys, random.randrange(4))}
    return random.choice(SCALARS)


def _mutated(value: Any, random: Random) -> Any:
    """Change one thing somewhere inside."""
    if isinstance(value, dict) and value:
        key = random.choice(list(value))
        return {**value, key: _mutated(value[key], random)}
    if isinstance(value, list) and value:
        return [*value[:-1], _mutated(value[-1], random)]
    return _anything(random, 0)


def _read(findings: Findings, path: Path) -> list[Any] | None:
    """Read as prompts and as examples; None where both refuse."""
    found: list[Any] = []
    for read in (read_prompts, read_examples):
        try:
            found += read(path, "data.file")
        except DataError as error:
            if "data.file=" not in str(error) or len(str(error)) > 2000:
                raise ChangedError(f"the message does not name the file, or is long: {str(error)[:300]}") from error
    findings.counts["accepted" if found else "refused"] += 1
    return found or None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _same_rows(findings: Findings, folder: Path, random: Random) -> None:
    """Sound rows: both formats give the same prompts, which are those of the rows."""
    rows = [_row(random, broken=False) for _ in range(random.randrange(1, 4))]
    is_chat = isinstance(rows[0]["prompt"], list)
    rows = [row for row in rows if isinstance(row["prompt"], list) == is_chat]  # a column has one type
    lines = folder / "rows.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    table = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), table)
    wanted = [_without_nulls(row["prompt"]) for row in rows] * 2
    for path in (lines, table):
        with findings.case("data_files", (path.suffix, rows)):
            got = [_without_nulls(item.prompt) for item in _read(findings, path) or ()]
            if got != wanted:
                raise ChangedError(f"prompts are {got}, and {wanted} was written")


def _broken_lines(findings: Findings, folder: Path, random: Random) -> None:
    rows = [_row(random, broken=True) for _ in range(random.randrange(1, 4))]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    for _ in range(random.randrange(3)):
        cut = random.randrange(len(data))
        junk = random.choice(JUNK)
        data = data[:cut] + junk + data[cut + random.randrange(4) :]
    path = folder / "rows.jsonl"
    path.write_bytes(data)
    with findings.case("data_files", data):
        _read(findings, path)


def _strange_columns(findings: Findings, folder: Path, random: Random) -> None:
    table = pa.Table.from_pylist([_row(random, broken=False)] * 2)
    for _ in range(random.randrange(1, 3)):
        name, column = random.choice([*table.column_names, "images"]), random.choice(ARRAYS)()
        if random.random() < 0.3:
            column = pa.StructArray.from_arrays([column], names=["at"])
        index = table.column_names.index(name) if name in table.column_names else -1
        twice = index < 0 or random.random() < 0.1
        table = table.append_column(name, column) if twice else table.set_column(index, name, column)
    path = folder / "rows.parquet"
    pq.write_table(table, path)
    with findings.case("data_files", str(table.schema)):
        _read(findings, path)


def _broken_bytes(findings: Findings, folder: Path, random: Random) -> None:
    """A file of which some bytes are others, or which ends early; the format's own checksums are there to see it."""
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([_row(random, broken=False)] * 3), path)
    data = bytearray(path.read_bytes())
    for _ in range(random.randrange(4)):
        data[random.randrange(len(data))] = random.randrange(256)
    path.write_bytes(data[: random.choice([len(data), random.randrange(len(data))])])
    with findings.case("data_files", bytes(data)):
        _read(findings, path)
