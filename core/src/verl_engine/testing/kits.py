"""What a kit is: it proves plugins of one kind, and ``verl-engine check`` runs it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Kit(Protocol):
    """A class like this is named by the `kit` of a KindSpec."""

    version: str
    """The plugin's distribution and version."""
    ranks: int
    """How many processes there are where a check wants several."""

    def __init__(self, name: str, settings: Mapping[str, Any], /, *, ranks: int, timeout_s: float) -> None:
        """Find the plugin; `settings` are fields of its section, `timeout_s` is for each step of a check."""

    @staticmethod
    def all_checks() -> Sequence[Any]:
        """Return every check, in order; each has a `name` (``topic/what``) and says what it `proves`."""

    def run(self, check: Any, /) -> Any:
        """Run one and return an outcome, as `conformance.check.Outcome`, whatever the plugin does."""

    def close(self) -> None:
        """End what was started."""
