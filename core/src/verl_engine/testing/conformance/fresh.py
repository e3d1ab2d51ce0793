"""Run one function of a check in a new Python, where nothing is imported yet."""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verl_engine.testing.conformance.check import SkipCheckError, Subject

_MARK = "verl-engine-conformance:"


class FreshProcessError(AssertionError):
    """A check failed in its fresh process."""

    def __init__(self, summary: str, details: str) -> None:
        super().__init__(summary)
        self.summary, self.details = summary, details


def run_fresh(function: Callable[[Any], None], subject: Subject, folder: Path, timeout_s: float) -> None:
    """Call ``function(subject)`` in a new Python with this one's paths, in an empty folder.

    The function is module-level, and its module imports nothing that it looks for. A FreshProcessError where it raised,
    died, or took too long; a SkipCheckError where it cannot show anything here.
    """
    call = json.dumps(
        [function.__module__, function.__name__, subject.backend, dict(subject.settings), subject.distribution]
    )
    try:
        done = subprocess.run(  # noqa: S603 - this Python and our own module
            [sys.executable, "-c", f"from {__name__} import main; main()", call],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, filter(None, sys.path)))},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FreshProcessError(f"no result within {timeout_s:g} s", str(error)) from error
    results = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    if not results:
        written = f"{done.stdout}{done.stderr}"
        raise FreshProcessError(f"the process died without a result (exit code {done.returncode})", written)
    status, summary, details = json.loads(results[-1])
    if status == "skipped":
        raise SkipCheckError(summary)
    if status == "failed":
        raise FreshProcessError(summary, details)


def main() -> None:
    """Be the new Python."""
    module, name, backend, settings, distribution = json.loads(sys.argv[1])
    result = ["passed", "", ""]
    try:
        getattr(importlib.import_module(module), name)(Subject(backend, settings, distribution))
    except SkipCheckError as error:
        result = ["skipped", str(error), ""]
    except Exception as error:  # noqa: BLE001 - a backend can raise anything
        kind = "" if isinstance(error, AssertionError) and str(error) else f"{type(error).__name__}: "
        result = ["failed", f"{kind}{error}", traceback.format_exc()]
    sys.stdout.write(f"\n{_MARK}{json.dumps(result)}\n")
