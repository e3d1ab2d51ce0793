"""The ``data`` section of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from verl_engine.contract.bounded import LARGEST_COUNT, Count, Seed
from verl_engine.contract.strict_model import StrictModel

_OURS: Final = frozenset(
    ("conversation", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "padding",
     "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs",
     "messages")
)  # fmt: skip
"""What jobs themselves say to a chat template, or to transformers where it fills one in."""


def _named(path: object) -> object:
    if path == "":  # would be the current folder
        raise ValueError("must not be empty")
    return path


NamedPath = Annotated[Path, BeforeValidator(_named)]


class DataFileConfig(StrictModel):
    """One of several files."""

    path: NamedPath
    """Parquet or JSONL file."""
    weight: float | None = Field(default=None, ge=1e-6, le=1e6)
    """Its share of the rows that are drawn, relative to the other files' weights; all files have one, or none. Without
    weights, the rows of all files are drawn alike, as if they were in one."""


def _weighted_alike(files: Path | tuple[DataFileConfig, ...]) -> Path | tuple[DataFileConfig, ...]:
    if not isinstance(files, Path):
        if not files:
            raise ValueError("must be a file, or a list with at least one")
        without = [index for index, file in enumerate(files) if file.weight is None]
        if 0 < len(without) < len(files):
            raise ValueError(
                f"the file at index {without[0]} has no weight, and others have; give all files one, or none"
            )
    return files


DataFiles = Annotated[NamedPath | tuple[DataFileConfig, ...], AfterValidator(_weighted_alike)]


def _not_ours(settings: dict[str, Any]) -> dict[str, Any]:
    for name in settings:
        if name in _OURS:
            raise ValueError(f"{name!r} is set by the job itself; leave it out")
    tools = settings.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools must be a list of mappings, each a tool as a JSON schema")
    return settings


class _DataConfig(StrictModel):
    """What prompts and examples share."""

    overlong: Literal["error", "drop"] = "error"
    """What a row with too many tokens is: an error that names it, or left out. How many were left out is said at the
    start, with the first of them. Nothing is cut."""
    chat_template: Annotated[dict[str, Any], AfterValidator(_not_ours)] = Field(default_factory=dict)
    """Arguments for the model's chat template, such as ``{enable_thinking: false}``, or ``tools``, a list of JSON
    schemas. One that the template does not mention is an error."""
    shuffle: bool = True
    """Draw a new order in each pass over the rows, from ``seed``."""
    seed: Seed = 0
    """Order of the rows, and in RL the random streams of sampling."""


class DataConfig(_DataConfig):
    """Prompts, in verl's columns: data_source, prompt, reward_model.ground_truth, extra_info."""

    prompts: DataFiles
    """Parquet or JSONL file of training prompts, or a list of files."""
    max_prompt_tokens: Count = 1024
    """Of the longest prompt, in evaluations too; see ``overlong``."""


class SftDataConfig(_DataConfig):
    """Supervised examples: a prompt (chat list or text) and the response to learn, or whole conversations."""

    examples: DataFiles
    """Parquet or JSONL file with columns ``prompt`` and ``response``, or ``messages``; or a list of files."""
    max_tokens: int = Field(default=2048, ge=2, le=LARGEST_COUNT)
    """Of the longest example, prompt and response together; see ``overlong``."""


def listed(files: Path | tuple[DataFileConfig, ...], field: str) -> list[tuple[str, Path]]:
    """Return each file with the dotted path of its field."""
    if isinstance(files, Path):
        return [(field, files)]
    return [(f"{field}[{index}]", file.path) for index, file in enumerate(files)]


def weights_of(files: Path | tuple[DataFileConfig, ...]) -> tuple[float, ...] | None:
    """Return the weights of files; None where they have none."""
    if isinstance(files, Path):
        return None
    weights = tuple(file.weight for file in files if file.weight is not None)
    return weights or None
