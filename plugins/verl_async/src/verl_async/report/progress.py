"""Which progress display fits where the output goes."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from verl_async.report.live_progress import LiveProgress
from verl_async.report.plain_progress import PlainProgress

if TYPE_CHECKING:
    from typing import TextIO


def open_progress(title: str, stream: TextIO | None = None) -> LiveProgress | PlainProgress:
    """Return a display for `stream` (standard output by default): a panel on a terminal, plain lines elsewhere.

    The stream itself is asked, not rich: FORCE_COLOR, which CI systems set, makes rich take a log file for a terminal.

    Args:
        title: heads the panel, such as ``verl-engine train``.
        stream: where to write.

    Returns:
        A listener that is a context manager.
    """
    stream = sys.stdout if stream is None else stream
    draws = (stream.encoding or "").lower().startswith("utf") and os.environ.get("TERM", "") not in {"dumb", "unknown"}
    if stream.isatty() and draws:
        return LiveProgress(Console(file=stream), title)
    return PlainProgress(stream)
