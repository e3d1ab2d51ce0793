"""How a job and its reward processes write to each other: a length, then a pickle. Both ends are the job's own."""

from __future__ import annotations

import pickle
import struct
from typing import Any, Final

HEADER: Final = struct.Struct("!Q")
"""The length of what follows, in bytes."""


def frame(value: object) -> bytes:
    """Write a value."""
    data = pickle.dumps(value)
    return HEADER.pack(len(data)) + data


def content(data: bytes) -> Any:
    """Read what follows a header."""
    return pickle.loads(data)  # noqa: S301 - of a process of the same user that this job started
