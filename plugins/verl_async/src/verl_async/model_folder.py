"""Whether a Hugging Face model folder is complete, and how large its weights are. Reads headers only; no torch."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from verl_engine.contract.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

# What transformers looks for, in its order; an index lists the files of weights in several parts.
_WEIGHT_FILES: Final = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
    "*.tiktoken",
)
_LARGEST_HEADER: Final = 100 * 2**20  # the safetensors format's own limit


@dataclass(frozen=True, slots=True)
class WeightSizes:
    """Number of elements of a model's tensors."""

    total: int
    largest: int
    """Of one tensor; 0 where only file sizes are known (``.bin`` weights)."""


def check_model_folder(folder: Path, where: str = "model.path") -> WeightSizes:
    """Check that the folder holds config.json, a tokenizer and complete weights.

    Args:
        folder: the model folder.
        where: dotted path of the setting, for messages.
    Returns:
        The sizes of its weights.
    Raises:
        ModelError: something is missing, cut short or not what its name says; the message names the file.
    """
    at = f"{where}={folder}"
    if not folder.is_dir():
        reason = "is a file" if folder.exists() else "does not exist"
        raise ModelError(
            f"{at} {reason}; give a local Hugging Face model folder. To fetch a model from the hub: "
            "`hf download OWNER/NAME --local-dir FOLDER`"
        )
    if not (folder / "config.json").is_file():
        raise ModelError(f"{at} holds no config.json, so it is not a Hugging Face model folder{_hint(folder)}")
    _read_json(folder / "config.json", at)
    if not any(path.is_file() for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)):
        raise ModelError(
            f"{at} holds no tokenizer (tokenizer.json or tokenizer_config.json); save it with "
            "`tokenizer.save_pretrained(FOLDER)` or copy it from the original model"
        )
    return _weight_sizes(_weight_files(folder, at), at)


def warning_on_vocabulary(folder: Path) -> list[str]:
    """Say that the tokenizer knows more tokens than the model, where both files say how many.

    Such tokens may never occur, so it is no error here: prompts are compared when they are tokenized.
    """
    config = _read_json(folder / "config.json", "model.path")
    text_config = config.get("text_config")
    size = (text_config if isinstance(text_config, dict) else config).get("vocab_size")
    file = folder / "tokenizer.json"
    if not isinstance(size, int) or not file.is_file():
        return []
    tokenizer = _read_json(file, "model.path")
    try:
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        largest = max(*ids, *(token["id"] for token in tokenizer.get("added_tokens") or ()), -1, -1)
    except (KeyError, TypeError, ValueError):
        return []  # a kind of tokenizer that says it elsewhere
    if largest < size:
        return []
    warning = (
        f"model.path={folder}: the tokenizer has token ids up to {largest}, and the model's vocab_size is {size}; a "
        "prompt with a token beyond that ends the job before it trains"
    )
    return [warning]


def _hint(folder: Path) -> str:
    """Name a folder inside that does look like a model: people often give its parent."""
    inside = sorted(path.parent.name for path in folder.glob("*/config.json"))
    return f"; did you mean {folder / inside[0]}?" if inside else ""


def _weight_files(folder: Path, at: str) -> list[Path]:
    """All files of the weights, each of them there."""
    first = next((folder / name for name in _WEIGHT_FILES if (folder / name).is_file()), None)
    if first is None:
        raise ModelError(f"{at} holds no weights; expected one of {', '.join(_WEIGHT_FILES)}")
    if not first.name.endswith(".index.json"):
        return [first]
    weight_map = _read_json(first, at).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{at}: {first.name} holds no weight_map; download the model again")
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{at} lacks {len(missing)} of {len(names)} weight files, such as {missing[0]}; finish the download"
        )
    return [folder / name for name in names]


def _weight_sizes(files: list[Path], at: str) -> WeightSizes:
    total = largest = 0
    for file in files:
        if file.suffix != ".safetensors":
            total += file.stat().st_size // 2  # 2 bytes an element at least, so an upper bound
            continue
        sizes = _safetensors_sizes(file, at)
        total += sum(sizes)
        largest = max(largest, *sizes, 0)
    return WeightSizes(total, largest)


def _safetensors_sizes(file: Path, at: str) -> list[int]:
    """Elements of each tensor, from the header: 8 bytes of length, then JSON that says where the data lie."""
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == len(b"12345678") else _LARGEST_HEADER + 1
        raw = stream.read(length) if length <= _LARGEST_HEADER else b""
    try:
        header = json.loads(raw)
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors), default=0)
        sizes = [math.prod(entry["shape"]) for entry in tensors]
    except (ValueError, AttributeError, KeyError, IndexError, TypeError) as error:
        pointer = "; it is a Git LFS pointer: run `git lfs pull`" if start == b"version " else ""
        raise ModelError(f"{at}: {file.name} is not a safetensors file{pointer or '; download it again'}") from error
    if file.stat().st_size < end:
        raise ModelError(f"{at}: {file.name} is cut short: {file.stat().st_size} bytes of {end}; download it again")
    return sizes


def _read_json(file: Path, at: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{at}: {file.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{at}: {file.name} must hold a JSON object")
    return content
