"""What a check is, and what comes of one. Imports no torch: checks of import hygiene use it too."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_engine.contract.backend import FEATURES

Place = Literal["fresh process", "one rank", "all ranks"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One function of a check, and where it runs."""

    place: Place
    function: Callable[[Any], None]
    """Module-level. Takes a `Bench` on ranks, a `Subject` in a fresh process; raises where the backend is wrong."""


def fresh_process(function: Callable[[Any], None]) -> Phase:
    """Run it in a new Python, in which nothing is imported yet."""
    return Phase("fresh process", function)


def one_rank(function: Callable[[Any], None]) -> Phase:
    """Run it in a world of a single rank."""
    return Phase("one rank", function)


def all_ranks(function: Callable[[Any], None]) -> Phase:
    """Run it on all ranks at once: as many as were asked for, one where the backend cannot do with more."""
    return Phase("all ranks", function)


@dataclass(frozen=True)
class Check:
    """Something that the contract asks for, with the functions that find out."""

    name: str
    """``topic/what``."""
    phases: tuple[Phase, ...]
    """In order; they share a folder."""
    features: tuple[str, ...] = ()
    """Of `FEATURES`; a backend that declares one of them a gap skips the check. ``multi_rank`` says that it shows
    nothing on a single rank."""

    def __post_init__(self) -> None:
        assert set(self.features) <= FEATURES.keys(), self.features
        assert self.proves, f"{self.name} needs a docstring"

    @property
    def proves(self) -> str:
        """The rule, in a sentence: the first line of its last function's docstring."""
        return (inspect.getdoc(self.phases[-1].function) or "").partition("\n\n")[0].replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is checked."""

    backend: str
    settings: Mapping[str, Any]
    """Fields of the engine section besides ``backend``, for every engine that the kit builds."""
    distribution: str = ""
    """That offers the backend."""

    def section(self, **overrides: Any) -> dict[str, Any]:
        """Return an engine section."""
        return {"backend": self.backend, "learning_rate": 1e-3, "seed": 0, **self.settings, **overrides}


class SkipCheckError(AssertionError):
    """A check cannot show anything here; the message says why."""


def require(is_right: bool, message: str) -> None:
    """Fail the check unless something is as the contract says.

    Raises:
        AssertionError: with the message.
    """
    if not is_right:
        raise AssertionError(message)
