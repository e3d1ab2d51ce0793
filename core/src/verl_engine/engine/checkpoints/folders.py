"""The folders of checkpoints: a step's gets its name by a rename when all in it is on the disk. Imports no torch."""

import fcntl
import operator
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from verl_engine.contract.errors import ConfigError, WeightsError

MANIFEST: Final = "checkpoint.json"
METADATA: Final = ".metadata"
"""Written by torch's distributed checkpoints: which part of which tensor is where."""
_WHOLE: Final = re.compile(r"step-(\d{8,})")
_REMAINS: Final = re.compile(r"\.step-\d{8,}\.(partial|deleted)")


def as_count(field: str, value: object, least: int = 0) -> int:
    """Return an integer of any kind, such as numpy's, as Python's; a ConfigError for others, or below `least`."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise ConfigError(f"{field}={value!r} must be an integer, and is {type(value).__name__}")
    if number < least:
        raise ConfigError(f"{field}={number} must be {least} or more")
    return number


def step_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step is, or would be."""
    return root / f"step-{step:08d}"


def partial_folder(root: Path, step: int) -> Path:
    """Return where the checkpoint of a step is written, before it is whole."""
    return root / f".step-{step:08d}.partial"


def named_step(folder: Path) -> int | None:
    """Return the step that a folder is named after, if it is named so."""
    match = _WHOLE.fullmatch(folder.name)
    return int(match[1]) if match else None


def whole_steps(root: Path) -> list[int]:
    """List the steps of which there is a whole checkpoint, lowest first."""
    if not root.is_dir():
        return []
    found = ((named_step(path), path) for path in root.iterdir())
    return sorted(step for step, path in found if step is not None and is_whole(path))


def is_whole(folder: Path) -> bool:
    """Whether a folder is a whole checkpoint; a copy of one that was interrupted is not."""
    return all((folder / name).is_file() for name in (MANIFEST, METADATA))


def require_whole(folder: Path) -> Path:
    """Return the folder; a WeightsError where it is no whole checkpoint."""
    missing = [name for name in (MANIFEST, METADATA) if not (folder / name).is_file()]
    if missing:
        raise WeightsError(f"{folder} holds no whole checkpoint (there is no {' and no '.join(missing)} in it)")
    return folder


def find_step(root: Path, step: int | None) -> int:
    """Return the step, or the latest one for None; a WeightsError, which lists what there is, where it is not whole."""
    steps = whole_steps(root)
    if step is None and steps:
        return steps[-1]
    if step in steps and step is not None:
        return step
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    raise WeightsError(
        f"{root} holds no whole {wanted}; there are those of steps {', '.join(map(str, steps)) or 'none'}"
    )


def clear_remains(root: Path) -> None:
    """Delete what an interrupted write or deletion left."""
    if root.is_dir():
        for path in root.iterdir():
            if _REMAINS.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def publish(root: Path, step: int) -> None:
    """Give a written checkpoint its final name. All its files are on the disk already; their names are made so here."""
    partial = partial_folder(root, step)
    for folder, _, _ in os.walk(partial):
        sync(Path(folder))
    partial.rename(step_folder(root, step))
    sync(root)


def claim(root: Path) -> int:
    """Make the folder of checkpoints, and keep other writers out of it: they would write into each other's.

    Returns what `release` takes; the kernel releases it too, when the process ends in any way. A WeightsError where
    there is another writer.
    """
    root.mkdir(parents=True, exist_ok=True)
    handle = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise WeightsError(
            f"another process, or another store of this one, is writing a checkpoint to {root} at this moment; give "
            "each engine a folder of its own"
        ) from None
    except OSError:  # storage without locks
        pass
    return handle


def release(handle: int) -> None:
    """Let others write; for processes that were forked meanwhile too, which share the lock."""
    with suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


def make_partial(root: Path, step: int) -> None:
    """Make the hidden folder that a checkpoint is written in; a WeightsError where there is one of the step."""
    if step_folder(root, step).exists():
        raise WeightsError(f"{root} holds one already; remove({step}) first, or save under another step")
    clear_remains(root)
    partial_folder(root, step).mkdir(parents=True)


def delete(root: Path, step: int) -> None:
    """Delete a checkpoint; it is gone from the list at once, and never half there."""
    hidden = root / f".step-{step:08d}.deleted"
    shutil.rmtree(hidden, ignore_errors=True)
    step_folder(root, step).rename(hidden)
    sync(root)
    shutil.rmtree(hidden, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, and wait until its content is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until the names in a folder, or the content of a file that a library wrote, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def names_in(folder: Path) -> set[str]:
    """Return the names of all files in a folder and those below, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def folder_bytes(folder: Path) -> int:
    """Return what all files in a folder take."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
