"""What a fuzzed case must come to: it is accepted, or refused with a message of ours, in time."""

from __future__ import annotations

import signal
import traceback
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

TIME_LIMIT_S: Final = 10.0
"""Of a case, in CPU time: a busy machine is no hang."""
_MOST_SHOWN: Final = 5


class ChangedError(AssertionError):
    """A value was silently turned into another, or a refusal does not say what it is about."""


class _HangError(BaseException):
    """A case took too long."""


class Findings:
    """Counts cases and what was wrong with them, and keeps the first few."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.shown: dict[str, list[str]] = {"tracebacks": [], "hangs": [], "changed": []}

    @contextmanager
    def case(self, kind: str, what: object) -> Iterator[None]:
        """Run one case of a kind (``configs``, ``data_files``)."""
        self.counts[kind] += 1
        before = signal.signal(signal.SIGVTALRM, _end)
        signal.setitimer(signal.ITIMER_VIRTUAL, TIME_LIMIT_S)
        try:
            yield
        except ChangedError as error:
            self._note("changed", what, str(error))
        except _HangError:
            self._note("hangs", what, traceback.format_exc(limit=-6))
        except Exception:  # noqa: BLE001 - all that is none of ours is what is looked for
            self._note("tracebacks", what, traceback.format_exc(limit=-6))
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    def _note(self, finding: str, what: object, text: str) -> None:
        self.counts[finding] += 1
        if len(self.shown[finding]) < _MOST_SHOWN:
            self.shown[finding].append(f"{finding}: {what!r:.2000}\n{text}")

    def summary(self) -> dict[str, int]:
        """Return the counts that matter."""
        names = ("configs", "data_files", "accepted", "refused", *self.shown)
        return {name: self.counts[name] for name in names}

    def report(self) -> str:
        """Show the first few findings of each kind."""
        return "\n".join(text for texts in self.shown.values() for text in texts)


def _end(*_: object) -> None:
    raise _HangError
