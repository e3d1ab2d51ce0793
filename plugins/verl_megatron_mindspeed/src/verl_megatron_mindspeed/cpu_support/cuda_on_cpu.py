"""``torch.cuda``, as Megatron's modules see it on a CPU: one device, the CPU, which has done all work at once."""

import contextlib
from contextlib import AbstractContextManager
from typing import Any, Final

import torch


def __getattr__(name: str) -> Any:
    """Hand through all the rest."""
    return getattr(torch.cuda, name)


def current_device() -> torch.device:
    """Return the CPU."""
    return torch.device("cpu")


def synchronize(*_: object) -> None:
    """Do nothing."""


def manual_seed(seed: int) -> None:
    """Seed the CPU's generator, which dropout takes."""
    torch.default_generator.manual_seed(seed)


def get_rng_state(*_: object, **__: object) -> torch.Tensor:
    """Return the state of the CPU's generator."""
    return torch.get_rng_state()


class Event:
    """Something that has happened."""

    def synchronize(self) -> None:
        """Do nothing."""


class Stream:
    """A queue that is empty."""

    def __init__(self, *_: object, **__: object) -> None:
        """Take what CUDA's takes."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""

    def record_event(self) -> Event:
        """Return an event that has happened."""
        return Event()


_STREAM: Final = Stream()


def current_stream(*_: object) -> Stream:
    """Return the one stream that is current always."""
    return _STREAM


def stream(_: object) -> AbstractContextManager[None]:
    """Do nothing."""
    return contextlib.nullcontext()
