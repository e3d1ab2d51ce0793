"""Run one function of a check on a rank. Imports no torch: a rank prepares itself for its backend first."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl_engine.contract.validation import validate
from verl_engine.host.backend_host import BackendHost
from verl_engine.testing.conformance.check import Subject

if TYPE_CHECKING:
    from pathlib import Path


def prepare_rank(subject: Subject) -> None:
    """Let the backend prepare the process, as a worker would."""
    host = BackendHost.load(subject.backend)
    host.prepare_process(validate(host.spec.config_class, subject.section(), at="engine"))


def run_on_rank(
    rank: int, function: Callable[[Any], None], subject: Subject, world_size: int, models: Path, folder: Path
) -> str | None:
    """Call the function with this rank's bench.

    Returns:
        Why it was skipped, if it was.
    """
    from verl_engine.testing.conformance.bench import Bench
    from verl_engine.testing.conformance.check import SkipCheckError

    gaps = dict(BackendHost.load(subject.backend).spec.capabilities.gaps)
    try:
        function(Bench(subject, rank, world_size, gaps, models, folder))
    except SkipCheckError as skip:
        return str(skip)
    return None
