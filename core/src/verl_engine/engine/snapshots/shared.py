"""Snapshots that other processes of the machine read without a copy.

A file holds a header and two halves, each with room for all weights. The owner writes the half that does not hold the
newest content, then names it the newest. That stays whole until the owner has saved once more and begins to save again,
which a reader can see afterwards: with a lock, a slow one would stop the training.
"""

import mmap
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.snapshots.checksum import weights_checksum
from verl_engine.engine.snapshots.shared_file import SharedFile
from verl_engine.engine.weights.bucket import WeightBucket

_HEADER_BYTES: Final = 4096
_MAGIC: Final = 0x76657267_736E6170
"""Marks a file of this format."""
# Words of the header, int64. Contents are numbered from 1; content n lies in half (n - 1) % 2.
_MAGIC_WORD, _USE, _NEWEST = 0, 1, 2
_BEGUN: Final = (3, 4)
"""For each half the number of the content that was last begun there."""
_VERSION: Final = (5, 6)


@dataclass(frozen=True, slots=True)
class SnapshotHandle:
    """What another process needs to find a snapshot; small and picklable."""

    tag: str
    path: str
    use: int
    """Counts the owners of the file's memory: a tag's handle is of no use for the next tag's content."""
    layout: WeightBucket


class SharedSlot:
    """The owner's side of one file."""

    def __init__(self, layout: WeightBucket, folder: Path | None = None) -> None:
        """Make the file, with memory for one content; the second half gets its own when it is first needed.

        A WeightsError where there is no room; nothing is left behind.
        """
        self.layout = layout
        self._half_bytes = _half_bytes(layout)
        self._file = SharedFile(_HEADER_BYTES + 2 * self._half_bytes, folder)
        self._num_halves = 0
        try:
            self._grow()
        except WeightsError:
            self._file.close()
            raise
        mapped = mmap.mmap(self._file.descriptor, 0)
        self._header = np.frombuffer(mapped, np.int64, 8)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)
        starts = [_HEADER_BYTES, _HEADER_BYTES + self._half_bytes]
        self._halves = [layout.views(buffer[start:]) for start in starts]
        self._header[[_MAGIC_WORD, _USE]] = _MAGIC, 1

    @staticmethod
    def first_bytes(layout: WeightBucket) -> int:
        """Return the memory that a new slot takes."""
        return _HEADER_BYTES + _half_bytes(layout)

    @property
    def held_bytes(self) -> int:
        """Memory it takes."""
        return _HEADER_BYTES + self._num_halves * self._half_bytes

    @property
    def growth_bytes(self) -> int:
        """Memory that the next `begin` adds: the second half's, once."""
        return self._half_bytes if self._newest == 1 and self._num_halves == 1 else 0

    def begin(self) -> dict[str, torch.Tensor]:
        """Return the half that readers are not sent to, as the weights that it is to hold."""
        if self.growth_bytes:
            self._grow()
        number = self._newest + 1
        self._header[_BEGUN[_half(number)]] = number
        _fence()
        return self._halves[_half(number)]

    def commit(self, version: int) -> None:
        """Send readers to the content that was copied in since `begin`."""
        number = self._newest + 1
        self._header[_VERSION[_half(number)]] = version
        _fence()
        self._header[_NEWEST] = number

    def set_version(self, version: int) -> None:
        """Give the newest content another version."""
        self._header[_VERSION[_half(self._newest)]] = version

    def retire(self) -> None:
        """Turn the readers away; handles of the next owner are others."""
        self._header[_USE] += 1
        _fence()
        self._header[[_NEWEST, *_BEGUN]] = 0

    def close(self) -> None:
        """Turn the readers away and remove the file; its memory is free when nobody looks at it any more."""
        self.retire()
        self._halves = []
        self._file.close()

    def handle(self, tag: str) -> SnapshotHandle:
        """Return what a `SnapshotReader` needs."""
        return SnapshotHandle(tag, str(self._file.path), int(self._header[_USE]), self.layout)

    @property
    def _newest(self) -> int:
        return int(self._header[_NEWEST])

    def _grow(self) -> None:
        start = self.held_bytes if self._num_halves else 0
        self._num_halves += 1
        try:
            self._file.allocate(start, self.held_bytes - start)
        except WeightsError:
            self._num_halves -= 1
            raise


@dataclass(frozen=True, slots=True)
class SharedContent:
    """One content of a shared snapshot, seen by a reader, without a copy."""

    tensors: dict[str, torch.Tensor]
    """Not to be changed; what is changed all the same is seen by this process only."""
    version: int
    number: int
    """Counts what was saved under the tag, from 1."""
    _header: npt.NDArray[np.int64]
    _use: int

    def is_intact(self) -> bool:
        """Whether what was read so far is this content, and not partly a later one."""
        _fence()
        begun = int(self._header[_BEGUN[_half(self.number)]])
        return begun == self.number and int(self._header[_USE]) == self._use

    def checksum(self) -> int:
        """Compute the same as the owner's `WeightSnapshot.checksum`; a WeightsError if it was overwritten meanwhile."""
        crc = weights_checksum(self.tensors)
        if not self.is_intact():
            raise WeightsError("the shared snapshot was overwritten while it was read; take the newest again")
        return crc


class SnapshotReader:
    """A reader's side, in any process of the same user on the same machine."""

    def __init__(self, handle: SnapshotHandle) -> None:
        """Map the file, without a copy; a WeightsError where the owner dropped the tag, or is gone."""
        self._handle = handle
        try:
            with Path(handle.path).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = mmap.mmap(file.fileno(), _HEADER_BYTES, access=mmap.ACCESS_READ)
                # Copy on write: a reader that changes what it reads harms neither the owner nor other readers.
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise self._gone(f" ({error})") from error
        self._header = np.frombuffer(header, np.int64, 8)
        if int(self._header[_MAGIC_WORD]) != _MAGIC or size != _HEADER_BYTES + 2 * _half_bytes(handle.layout):
            raise WeightsError(f"{handle.path} is no shared snapshot of the layout that its handle gives")
        self._mapped = mapped
        self._halves: dict[int, dict[str, torch.Tensor]] = {}

    def newest(self) -> SharedContent:
        """Return the content that was saved last; a WeightsError where the tag was dropped, or laid out anew."""
        while True:
            number = int(self._header[_NEWEST])
            _fence()
            if int(self._header[_USE]) != self._handle.use:
                raise self._gone()
            content = SharedContent(
                self._views(_half(number)),
                int(self._header[_VERSION[_half(number)]]),
                number,
                self._header,
                self._handle.use,
            )
            if content.is_intact():
                return content

    def _views(self, half: int) -> dict[str, torch.Tensor]:
        if half not in self._halves:
            start = _HEADER_BYTES + half * _half_bytes(self._handle.layout)
            self._halves[half] = self._handle.layout.views(torch.frombuffer(self._mapped, dtype=torch.uint8)[start:])
        return self._halves[half]

    def _gone(self, reason: str = "") -> WeightsError:
        return WeightsError(
            f"the shared snapshot {self._handle.tag!r} is gone{reason}: its owner dropped it, saved weights of other "
            "shapes under the tag, or ended; ask the owner for a new handle"
        )


def _half(number: int) -> int:
    return (number - 1) % 2


def _half_bytes(layout: WeightBucket) -> int:
    """Whole pages, so that each half has memory of its own."""
    return max(-(-layout.num_bytes // mmap.PAGESIZE), 1) * mmap.PAGESIZE


_LOCK: Final = threading.Lock()


def _fence() -> None:
    """Keep the processor from moving reads and writes across: release, then acquire, of a lock does that everywhere.

    x86 needs it not, Arm does.
    """
    with _LOCK:
        pass
    with _LOCK:
        pass
