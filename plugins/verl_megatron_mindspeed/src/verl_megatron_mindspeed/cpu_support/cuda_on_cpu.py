"""``torch.cuda``, as Megatron's modules see it on a CPU: one device, the CPU, which has done all work at once."""

from typing import Any, Final

import torch
from torch.cpu import Event, stream, synchronize

__all__ = ["Event", "Stream", "current_device", "current_stream", "manual_seed", "stream", "synchronize"]

manual_seed = torch.default_generator.manual_seed  # which dropout takes


def __getattr__(name: str) -> Any:
    """Hand through all the rest."""
    return getattr(torch.cuda, name)


def current_device() -> torch.device:
    """Return the CPU."""
    return torch.device("cpu")


def get_rng_state(*_: object, **__: object) -> torch.Tensor:
    """Return the state of the CPU's generator."""
    return torch.get_rng_state()


class Stream(torch.cpu.Stream):
    """A queue that is empty."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take what CUDA's takes."""

    def record_event(self) -> Event:  # type: ignore[override] # as CUDA's
        """Return an event that has happened."""
        return Event()


_STREAM: Final = Stream()


def current_stream(*_: object) -> Stream:
    """Return the one stream that is current always."""
    return _STREAM
