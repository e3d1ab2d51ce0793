"""A flat buffer for the weights of one rank, in this process's own memory."""

import mmap
from contextlib import suppress
from typing import Final, Protocol

import torch

from verl_engine.contract.errors import WeightsError
from verl_engine.engine.weights.bucket import WeightBucket

_HUGE_PAGES: Final[int | None] = getattr(mmap, "MADV_HUGEPAGE", None)


class Slot(Protocol):
    """Memory for one content at a time; filled by `begin`, a copy, and `commit`."""

    layout: WeightBucket

    @property
    def held_bytes(self) -> int:
        """Memory it takes."""

    @property
    def growth_bytes(self) -> int:
        """Memory that the next `begin` adds."""

    def begin(self) -> dict[str, torch.Tensor]:
        """Return where to copy the next content to; a WeightsError where there is no memory, and the former stays."""

    def commit(self, version: int) -> None:
        """Declare what was copied the slot's content."""

    def set_version(self, version: int) -> None:
        """Give the same content another version."""

    def retire(self) -> None:
        """Declare that there is no content, before another owner uses the memory."""

    def close(self) -> None:
        """Give the memory back, as soon as nobody looks at it. Harmless when called twice."""


class PrivateSlot:
    """Memory of this process alone; pinned where there is an accelerator to copy from."""

    growth_bytes = 0

    def __init__(self, layout: WeightBucket, *, pinned: bool = False) -> None:
        """Reserve the memory; a WeightsError where there is not enough."""
        self.layout = layout
        self.held_bytes = layout.num_bytes
        self._views = layout.views(_new_buffer(max(layout.num_bytes, 1), pinned=pinned))

    def begin(self) -> dict[str, torch.Tensor]:
        """Return the buffer, as the weights that it is to hold."""
        return self._views

    def commit(self, version: int) -> None:
        """Do nothing: nobody else looks."""

    def set_version(self, version: int) -> None:
        """Do nothing: nobody else looks."""

    def retire(self) -> None:
        """Do nothing: nobody else looks."""

    def close(self) -> None:
        """Let the memory go."""
        self._views = {}


def _new_buffer(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    try:
        if pinned:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        memory = mmap.mmap(-1, num_bytes)
        if _HUGE_PAGES is not None:
            # The first save spends most of its time on page faults; huge pages have 512 times fewer.
            with suppress(OSError):  # a kernel without them
                memory.madvise(_HUGE_PAGES)
        return torch.frombuffer(memory, dtype=torch.uint8)
    except (OSError, MemoryError, RuntimeError) as error:
        raise WeightsError(
            f"a snapshot needs {num_bytes / 2**30:.2f} GiB of {'pinned ' if pinned else ''}memory, which this machine "
            f"does not give ({error}); drop a tag, or split the model over more ranks"
        ) from error
