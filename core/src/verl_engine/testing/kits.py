"""What a kit is: it proves plugins of one kind, and ``verl-engine check`` runs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class KitCheck(Protocol):
    """What a kit proves, a piece at a time."""

    @property
    def name(self) -> str:
        """``topic/what``."""

    @property
    def proves(self) -> str:
        """The rule, in a sentence."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one check."""

    check: KitCheck
    status: Literal["passed", "failed", "skipped"]
    reason: str = ""
    """Why it was skipped, or what is wrong."""
    details: str = ""
    """The traceback of a failure; of ranks that did not respond, where each of them is."""
    seconds: float = 0.0


class Kit(Protocol):
    """A class like this is named by the `kit` of a KindSpec."""

    version: str
    """The plugin's distribution and version."""
    ranks: int
    """How many processes there are where a check wants several."""

    def __init__(self, name: str, settings: Mapping[str, Any], /, *, ranks: int = ..., timeout_s: float) -> None:
        """Find the plugin; its section has the settings, and `ranks` is given where the user says it."""

    @staticmethod
    def all_checks() -> Sequence[KitCheck]:
        """Return every check, in order."""

    def run(self, check: Any, /) -> Outcome:
        """Run one, whatever the plugin does."""

    def close(self) -> None:
        """End what was started."""
