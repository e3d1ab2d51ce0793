"""Rows of a Parquet or JSONL file, each knowing where it stands so that errors can name it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from verl_async.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    import pyarrow as pa

    _Placed = tuple[str, dict[str, Any], tuple[str, ...]]
    """Where a row stands, its values, and the names of all its columns."""

SUFFIXES = (".parquet", ".jsonl")
MEDIA = ("image", "images", "video", "videos", "audio", "audios", "multi_modal_data", "multi_modal_inputs")
"""Columns of prompts that are more than text: the model would read a literal ``<image>`` and never see one."""
_DEEPEST = 100
"""How deep values may lie in each other; copying and quoting far deeper ones fails."""
_MOST_NAMED = 20
"""Columns that one message lists."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file."""

    index: int
    """Counted from 0; blank lines do not count."""
    where: str
    """Config field, file, and line or row: how each error message begins."""
    values: dict[str, Any]
    columns: tuple[str, ...]
    """All that the row has in the file, also those that were not wanted."""

    def get(self, column: str, expected: str) -> Any:
        """Return a column's value.

        Raises:
            DataError: the row has no such column, or null in it; says what was ``expected``.
        """
        if column not in self.values:
            found = list_names(self.columns)
            raise DataError(
                f"{self.where}: no column {column!r}; columns found: {found}; expected {column!r}, {expected}"
            )
        if self.values[column] is None:
            raise self.error(column, None, expected)
        return self.values[column]

    def error(self, column: str, got: object, expected: str) -> DataError:
        """Make the error for a value of the wrong type or content."""
        return DataError(f"{self.where}: {column} is {shorten(got)}; expected {expected}")


def shorten(value: object, length: int = 80) -> str:
    """Quote a value in a message without flooding it."""
    try:
        text = "null" if value is None else repr(value)
    except RecursionError:
        text = "a value that is nested too deeply"
    return text if len(text) <= length else f"{text[: length - 3]}..."


def list_names(columns: Collection[str]) -> str:
    """List columns in a message; long names are cut, and of many only the first are named."""
    named = [shorten(name, 40) for name in list(columns)[:_MOST_NAMED]]
    more = len(columns) - len(named)
    return ", ".join([*named, *([f"{more} more"] if more else [])]) or "none"


def read_rows(
    path: Path, field: str, columns: tuple[str, ...], limit: int | None = None, found: set[str] | None = None
) -> Iterator[Row]:
    """Read a file row by row.

    Args:
        path: a ``.parquet`` or ``.jsonl`` file.
        field: dotted path of the config field that names the file; for messages.
        columns: those wanted; further ones are not loaded from Parquet.
        limit: only so many rows, from the first.
        found: gets the names of all columns that the rows have.
    Raises:
        DataError: the file is missing, of another kind, empty, or malformed, or a row has images or sound; while
            reading.
    """
    place = f"{field}={path}"
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{place}: unknown suffix {path.suffix!r}; expected a {' or '.join(SUFFIXES)} file")
    try:
        is_file = path.is_file()
    except OSError as error:  # its name is too long, say
        raise DataError(f"{field}={shorten(str(path))}: cannot be read: {error.strerror}") from error
    if not is_file:
        fault = "it is a folder" if path.is_dir() else "no such file"
        raise DataError(f"{place}: {fault}; expected an existing {suffix} file (relative paths start at {path.cwd()})")
    numbered = _parquet_rows(path, place, columns) if suffix == ".parquet" else _jsonl_rows(path, place)
    row = None
    for index, (where, values, names) in enumerate(islice(numbered, limit)):
        row = Row(index, where, values, names)
        for column in MEDIA:
            if values.get(column):
                raise row.error(column, values[column], "none: jobs train on text alone; take these rows out")
        if found is not None:
            found.update(names)
        yield row
    if row is None:
        raise DataError(f"{place}: the file holds no rows; expected at least one, with columns {', '.join(columns)}")


def _jsonl_rows(path: Path, place: str) -> Iterator[_Placed]:
    """Yield each non-blank line; lines are counted from 1, blank ones too, as editors do."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{place}, line {number}"
                    values = _parse_line(line, where)
                    yield where, values, tuple(values)
    except OSError as error:
        raise DataError(f"{place}: cannot be read: {error}") from error


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    expected = "expected one JSON object a line, such as {...}"
    try:
        # Decoded line by line, so that a bad byte is reported where it stands; "-sig" drops a byte order mark.
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 text ({error.reason} at byte {error.start}); {expected}") from error
    try:
        values = json.loads(text, object_pairs_hook=_each_once, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}): {shorten(text.strip())}; {expected}") from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: the line is {shorten(values)}; {expected}")
    if text.count("[") + text.count("{") > _DEEPEST and _is_deeper(values, _DEEPEST):
        raise DataError(f"{where}: values are nested more than {_DEEPEST} deep; {expected}")
    if "\\ud" in text.lower():
        _check_surrogates(values, where)
    return values


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its members; JSON lets a name stand twice, and then the last one would silently win."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return values


def _finite(text: str) -> float:
    number = float(text)
    if number in (math.inf, -math.inf):
        raise ValueError(f"{text} is larger than any number that can be held")
    return number


def _is_deeper(value: object, depth: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(item, depth - 1) for item in inner)


def _check_surrogates(values: dict[str, Any], where: str) -> None:
    """Refuse half of a surrogate pair: JSON can write it, but it is no character, and tokenizers fail on it."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise DataError(f"{where}: {half} is half of a surrogate pair; expected both halves, or none") from error


def _parquet_rows(path: Path, place: str, columns: tuple[str, ...]) -> Iterator[_Placed]:
    """Yield each row; rows are counted from 0, as dataframes do."""
    # Here, since it is slow to import and JSONL does without it.
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with ParquetFile(path) as file:
            found = tuple(file.schema_arrow.names)
            if len(set(found)) < len(found):
                twice = next(name for name in found if found.count(name) > 1)
                raise DataError(f"{place}: the column {twice!r} stands twice; expected each name once")
            wanted = [column for column in (*columns, *MEDIA) if column in found]
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for values in _plain_rows(batch, place, number):
                    yield f"{place}, row {number}", values, found
                    number += 1
    except (ArrowException, OSError, *_UNREADABLE) as error:  # of damaged files anything may come
        raise DataError(f"{place}: not a readable Parquet file after {number} rows: {error}") from error


_UNREADABLE = (ValueError, TypeError, OverflowError, KeyError, RecursionError)
"""What pyarrow raises of values that Python has no type for."""


def _plain_rows(batch: pa.RecordBatch, place: str, first: int) -> list[dict[str, Any]]:
    """Return a batch's rows as plain values; names the one that cannot be: bytes that are no text, a date too far."""
    try:
        return batch.to_pylist()
    except _UNREADABLE as error:
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            for index in range(len(column)):
                try:
                    column[index].as_py()
                except _UNREADABLE as reason:
                    raise DataError(
                        f"{place}, row {first + index}: {name} of type {shorten(str(column.type))} cannot be read: "
                        f"{shorten(str(reason), 200)}; write it as text, whole numbers, lists or mappings"
                    ) from reason
        raise DataError(f"{place}: not readable from row {first} on: {error}") from error
