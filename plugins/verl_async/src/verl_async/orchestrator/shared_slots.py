"""Two buffers in shared memory: the trainer writes weight buckets, rollout workers of the machine read them."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from verl_engine.contract.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - shared memory is what this is about
NUM_SLOTS: Final = 2


class SharedSlots:
    """Maps the same two files in writer and readers.

    Once all have mapped them the files are unlinked: the memory lives as long as someone maps it, and nothing can be
    left behind, however the job ends.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        """Map existing files."""
        self.paths = list(paths)
        self._maps = [_map(path) for path in paths]

    @classmethod
    def create(cls, num_bytes: int, folder: Path | None = None) -> SharedSlots:
        """Make the files, each of `num_bytes`, with all their pages.

        Args:
            num_bytes: of one slot.
            folder: where; by default the machine's shared memory, or the temporary folder where it has none.
        Raises:
            WeightsError: there is not enough room; nothing is left behind.
        """
        folder = folder or (_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir()))
        paths: list[str] = []
        try:
            for _ in range(NUM_SLOTS):
                descriptor, path = tempfile.mkstemp(prefix="verl-async-", dir=folder)
                paths.append(path)
                try:
                    _allocate(descriptor, num_bytes)
                finally:
                    os.close(descriptor)
            return cls(paths)
        except OSError as error:
            for path in paths:
                Path(path).unlink()
            raise WeightsError(
                f"weight_sync needs {NUM_SLOTS} buffers of {num_bytes / 2**20:.1f} MiB in {folder}, which has "
                f"{shutil.disk_usage(folder).free / 2**20:.1f} MiB free ({error.strerror}); lower "
                "weight_sync.bucket_bytes, make room, or set weight_sync.transport=object_store"
            ) from error

    def unlink(self) -> None:
        """Remove the names; the mapped memory stays."""
        for path in self.paths:
            Path(path).unlink(missing_ok=True)

    def __getitem__(self, slot: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a slot, without a copy."""
        return np.frombuffer(self._maps[slot], np.uint8)


@lru_cache(maxsize=2)  # the files have no names any more when the next sync opens them again
def _opened(paths: tuple[str, ...]) -> SharedSlots:
    return SharedSlots(paths)


@dataclass(frozen=True, slots=True)
class SharedMemoryTransport:
    """Handles are numbers of slots."""

    paths: tuple[str, ...]

    def open(self) -> None:
        """Map the slots, the first time."""
        _opened(self.paths)

    def read(self, handle: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a slot, without a copy."""
        return _opened(self.paths)[handle]


def _map(path: str) -> mmap.mmap:
    with Path(path).open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Reserve the pages now: a full shared memory is an error here, and would kill the writer later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.truncate(descriptor, num_bytes)
