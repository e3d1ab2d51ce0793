"""Rows of a Parquet or JSONL file, each knowing where it stands so that errors can name it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from verl_async.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    _Placed = tuple[str, dict[str, Any], tuple[str, ...]]
    """Where a row stands, its values, and the names of all its columns."""

SUFFIXES = (".parquet", ".jsonl")


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
            found = ", ".join(self.columns) or "none"
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
    text = "null" if value is None else repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def read_rows(path: Path, field: str, columns: tuple[str, ...], limit: int | None = None) -> Iterator[Row]:
    """Read a file row by row.

    Args:
        path: a ``.parquet`` or ``.jsonl`` file.
        field: dotted path of the config field that names the file; for messages.
        columns: those wanted; further ones are not loaded from Parquet.
        limit: only so many rows, from the first.
    Raises:
        DataError: the file is missing, of another kind, empty, or malformed; while reading.
    """
    place = f"{field}={path}"
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{place}: unknown suffix {path.suffix!r}; expected a {' or '.join(SUFFIXES)} file")
    if not path.is_file():
        fault = "it is a folder" if path.is_dir() else "no such file"
        raise DataError(f"{place}: {fault}; expected an existing {suffix} file (relative paths start at {path.cwd()})")
    numbered = _parquet_rows(path, place, columns) if suffix == ".parquet" else _jsonl_rows(path, place)
    row = None
    for index, (where, values, found) in enumerate(islice(numbered, limit)):
        row = Row(index, where, values, found)
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
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}): {shorten(text.strip())}; {expected}") from error
    if not isinstance(values, dict):
        raise DataError(f"{where}: the line is {shorten(values)}; {expected}")
    if "\\ud" in text.lower():
        _check_surrogates(values, where)
    return values


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
            wanted = [column for column in columns if column in found]
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for values in batch.to_pylist():
                    yield f"{place}, row {number}", values, found
                    number += 1
    except (ArrowException, OSError) as error:
        raise DataError(f"{place}: not a readable Parquet file after {number} rows: {error}") from error
