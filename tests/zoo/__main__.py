"""Put every causal architecture of the installed transformers through the checks, and print one JSON object last.

    python -m tests.zoo [NAME ...] [--processes 2] [--output docs/reference/models.json]

With names only these. `docs/generate_model_reference.py` makes a page of what was written. Each process takes a few
architectures; one that dies costs the one it was at.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 16
_WORST = ("crashed", "wrong", "refused", "right")


def main() -> None:
    """Run all in processes of their own, or, as such a process, some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, help="also write the JSON object there")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        _examine_here(arguments.names)
        return
    names = arguments.names or _all_names()
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]
    with ThreadPoolExecutor(arguments.processes) as pool:
        found = {name: checks for part in pool.map(_examine_elsewhere, chunks) for name, checks in part.items()}
    report = summary({name: found[name] for name in names})
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    sys.exit(bool(report["wrong"] or report["crashed"]))


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Count architectures by the worst state of their checks."""
    worst = {
        name: min((check["state"] for check in checks.values()), key=_WORST.index) for name, checks in found.items()
    }
    reasons = {
        state: {
            name: {check: outcome["detail"] for check, outcome in found[name].items() if outcome["state"] == state}
            for name in found
            if worst[name] == state
        }
        for state in _WORST[:-1]
    }
    return {
        "architectures": len(found),
        "right": sum(state == "right" for state in worst.values()),
        **{state: len(names) for state, names in reasons.items()},
        "reasons": reasons,
        "checks": {
            name: {
                check: " ".join(filter(None, (outcome["state"], outcome["state"] == "right" and outcome["detail"])))
                for check, outcome in checks.items()
            }
            for name, checks in found.items()
        },
    }


def _all_names() -> list[str]:
    from tests.zoo.architectures import names

    return names()


def _examine_here(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    import torch
    import transformers

    from tests.zoo.checks import examine

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in names:
        found = {check: dataclasses.asdict(outcome) for check, outcome in examine(name).items()}
        print(json.dumps({name: found}), flush=True)


def _examine_elsewhere(names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while left := [name for name in names if name not in found]:
        for name, checks in _run(left):
            found[name] = checks
            states = {check: outcome["state"] for check, outcome in checks.items()}
            bad = ", ".join(f"{check} {state}" for check, state in states.items() if state != "right")
            print(f"{name}: {bad or 'right'}", flush=True)
    return found


def _run(names: list[str]) -> Iterator[tuple[str, Any]]:
    """Yield what a process says of its architectures; of the one it died at, how it died."""
    left = list(names)
    command = [sys.executable, "-m", "tests.zoo", "--here", *names]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                ((name, checks),) = json.loads(line).items()
                left.remove(name)
                yield name, checks
        process.wait()
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:]
    if left:
        yield left[0], {"process": {"state": "crashed", "detail": f"exit status {process.returncode}: {last}"}}


if __name__ == "__main__":
    main()
