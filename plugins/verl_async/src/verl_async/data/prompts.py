"""Prompt files in verl's columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl_async.data.chat import read_prompt_column
from verl_async.data.rows import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from verl_async.data.rows import Row

COLUMNS = ("data_source", "prompt", "reward_model", "extra_info")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One task to answer, with what its reward needs."""

    index: int
    """Row in the file, counted from 0; blank lines do not count."""
    data_source: str
    """Which data set it is from; reward functions may choose by it."""
    prompt: str | list[dict[str, Any]]
    """A text, or a chat as a list of messages ``{"role": ..., "content": ...}``."""
    ground_truth: Any
    """``reward_model.ground_truth``; anything but null."""
    extra_info: dict[str, Any]
    """Whatever else the reward function reads; empty where the file has none."""
    file: str = ""
    """Which file it is from, such as ``data.prompts[1]``; empty for the one file of ``data.prompts``."""

    @property
    def row(self) -> str:
        """Its row, and which file; for messages."""
        return f"row {self.index} of {self.file}" if self.file else f"row {self.index}"


def read_prompts(path: Path, field: str, limit: int | None = None, found: set[str] | None = None) -> list[Prompt]:
    """Read a prompt file.

    Args:
        path: Parquet or JSONL with columns ``data_source``, ``prompt``, ``reward_model`` (with ``ground_truth`` in it)
            and, if wanted, ``extra_info``.
        field: dotted path of the config field that names the file, such as ``data.prompts``; for messages.
        limit: only so many rows, from the first; the rest is not looked at.
        found: gets the names of all columns that the rows have.
    Raises:
        DataError: the file is missing, of another kind, empty or malformed; names the line (JSONL, from 1) or the row
            (Parquet, from 0).
    """
    file = field if field.endswith("]") or field.startswith("evaluation.") else ""
    return [_read_prompt(row, file) for row in read_rows(path, field, COLUMNS, limit, found)]


def _read_prompt(row: Row, file: str) -> Prompt:
    data_source = row.get("data_source", "a text")
    if not isinstance(data_source, str) or not data_source:
        raise row.error("data_source", data_source, "a text that is not empty")
    extra_info = row.values.get("extra_info")
    if extra_info is None:
        extra_info = {}
    if not isinstance(extra_info, dict):
        raise row.error("extra_info", extra_info, "a mapping, or nothing")
    return Prompt(row.index, data_source, read_prompt_column(row), _read_ground_truth(row), extra_info, file)


def _read_ground_truth(row: Row) -> Any:
    expected = "a mapping with ground_truth in it (any value but null; '' where the reward function needs none)"
    reward_model = row.get("reward_model", expected)
    if not isinstance(reward_model, dict):
        raise row.error("reward_model", reward_model, expected)
    ground_truth = reward_model.get("ground_truth")
    if ground_truth is None:
        raise row.error("reward_model", reward_model, expected)
    return ground_truth
