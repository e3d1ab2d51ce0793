"""Files in shared memory: their owner removes them; if it was killed, the next owner does."""

import fcntl
import os
import secrets
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Final

from verl_engine.contract.errors import WeightsError

_SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - shared memory is what this is about
_PREFIX: Final = "verl-snapshot-"


class SharedFile:
    """A file that its owner keeps locked for as long as it lives.

    The kernel frees the lock when the owner ends, however it ends; so a file that can be locked is stale. Unlike a
    process id, a lock cannot be mistaken for another's, in containers that share the folder either.
    """

    def __init__(self, num_bytes: int, folder: Path | None = None) -> None:
        """Make a file of this length, without memory yet, and remove those of dead owners.

        By default it is in shared memory, or in the temporary folder where there is none. A WeightsError where it
        cannot be.
        """
        is_usable = _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)
        folder = folder or (_SHARED_MEMORY if is_usable else Path(tempfile.gettempdir()))
        remove_stale_files(folder)
        try:
            self.path, self.descriptor = _create_locked(folder)
            self.close = weakref.finalize(self, _end, self.path, self.descriptor, os.getpid())
            os.truncate(self.descriptor, num_bytes)
        except OSError as error:
            raise WeightsError(f"cannot make a file for shared snapshots in {folder}: {error}") from error

    def allocate(self, start: int, num_bytes: int) -> None:
        """Reserve the memory of a part now, or raise a WeightsError: later a full folder would kill whoever writes."""
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, start, num_bytes)
        except OSError as error:
            free = shutil.disk_usage(self.path.parent).free
            raise WeightsError(
                f"a shared snapshot needs {num_bytes / 2**30:.2f} GiB in {self.path.parent}, which has "
                f"{free / 2**30:.2f} GiB free ({error.strerror}); drop a tag, make that folder larger, or set "
                "engine.snapshot_memory=private"
            ) from error


def remove_stale_files(folder: Path) -> None:
    """Remove what owners left behind that were killed."""
    for path in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or another process is removing it too
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)


def _create_locked(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # another process took it for stale before it was locked


def _end(path: Path, descriptor: int, owner: int) -> None:
    """Remove a file; not in a forked child, which inherits the duty but not the file."""
    os.close(descriptor)
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
