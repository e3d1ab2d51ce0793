"""What a check is, and what comes of one. Imports no torch: checks of import hygiene use it too."""

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from verl_engine.contract.backend import FEATURES

Place = Literal["fresh process", "one rank", "all ranks"]


@dataclass(frozen=True, slots=True)
class Phase:
    """One function of a check, and where it runs."""

    place: Place
    function: Callable[[Any], None]
    """Module-level. Takes a `Bench` on ranks, a `Subject` in a fresh process; raises where the backend is wrong."""


fresh_process: Final = partial(Phase, "fresh process")
"""Run a function in a new Python, in which nothing is imported yet."""
one_rank: Final = partial(Phase, "one rank")
"""Run it in a world of a single rank."""
all_ranks: Final = partial(Phase, "all ranks")
"""Run it on all ranks at once: as many as were asked for, one where the backend cannot do with more."""


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


TOPICS: Final = (
    "loading", "config", "weights", "log_probs", "top_k", "values", "accumulation", "gradient_sync", "optimizer",
    "recovery", "modes", "determinism", "snapshots", "offload", "forward_only", "router_replay", "several_engines",
    "lora", "checkpoints", "deadlock",
)  # fmt: skip
"""Modules of this package, in the order in which their checks run: what others build on comes first."""


def all_checks() -> tuple[Check, ...]:
    """Return every check. Imports torch, which this module does not."""
    topics = [importlib.import_module(f"{__package__}.{topic}") for topic in TOPICS]
    return tuple(check for topic in topics for check in topic.CHECKS)


class SkipCheckError(AssertionError):
    """A check cannot show anything here; the message says why."""


def refusal(kind: type[Exception], attempt: Callable[[], object]) -> str | None:
    """Return the message of the error that an attempt raises; None where it raises none of this kind."""
    try:
        attempt()
    except kind as error:
        return str(error)
    return None


def require(is_right: bool, message: str) -> None:
    """Fail the check, with the message, unless something is as the contract says."""
    if not is_right:
        raise AssertionError(message)
