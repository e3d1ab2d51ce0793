"""Whether the files of a checkpoint are those that were saved, by size and SHA-256. Imports no torch."""

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import AfterValidator, NonNegativeInt, StringConstraints

from verl_engine.contract.errors import WeightsError
from verl_engine.contract.strict_model import StrictModel

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class SavedFile(StrictModel):
    """One file of a checkpoint, as it was written."""

    num_bytes: NonNegativeInt
    sha256: Digest


def _require_inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name:
        raise ValueError("a file's name must be a relative path that stays in the checkpoint's folder")
    return name


FileName = Annotated[str, AfterValidator(_require_inside)]
"""Of a file in a checkpoint, relative to its folder."""


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, SavedFile]:
    """Describe files as they are on the disk."""
    return {name: SavedFile(num_bytes=(folder / name).stat().st_size, sha256=_digest(folder / name)) for name in names}


def require_intact(
    folder: Path, files: Mapping[str, SavedFile], *, num_threads: int = 1, is_quick: bool = False
) -> None:
    """Make sure that files of a checkpoint are those that were saved; `num_threads` of them are read at once.

    A WeightsError names the first that is missing or short, or, unless `is_quick`, holds something else.
    """
    damage = short_file(folder, {name: saved.num_bytes for name, saved in files.items()})
    if not damage and not is_quick:
        with ThreadPoolExecutor(num_threads) as threads:
            digests = threads.map(lambda name: _digest(folder / name), files)
            changed = (name for name, found in zip(files, digests, strict=True) if found != files[name].sha256)
            damage = next((f"{name} holds something else than was saved (its SHA-256 differs)" for name in changed), "")
    if damage:
        raise WeightsError(f"{folder} is damaged: {damage}; load another step")


def short_file(folder: Path, sizes: Mapping[str, int]) -> str:
    """Say which file is missing, lies outside the folder, or has fewer bytes than it should; empty if none."""
    inside = folder.resolve()
    for name, num_bytes in sorted(sizes.items()):
        path = folder / name
        if not path.resolve().is_relative_to(inside):
            return f"{name} leads out of the folder"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size < num_bytes:
            return f"{name} has {path.stat().st_size} bytes of {num_bytes}"
    return ""


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
