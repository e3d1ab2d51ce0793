"""``verl-engine check``: the conformance kit on an installed backend."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from typing import TYPE_CHECKING, Any

from verl_engine.command.doctor.plugins import how_to_get
from verl_engine.command.parser import command_parser
from verl_engine.contract.config_file import read_overrides
from verl_engine.contract.errors import ConfigError, PluginImportError
from verl_engine.contract.names import BACKENDS_GROUP
from verl_engine.host.catalog import pip_install
from verl_engine.host.loading import find_plugin

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from verl_engine.testing.conformance.check import Check, Outcome
    from verl_engine.testing.conformance.kit import ConformanceKit

DESCRIPTION = """\
Prove an installed engine backend right: gradients, optimizer, snapshots, checkpoints and more, on tiny
models, against plain transformers. Its source is not needed. Takes about a minute on a laptop.

What the backend declares it cannot do is skipped with its reason; what it cannot do without saying so
fails. The exit code is 0 only if nothing failed."""

EXAMPLES = """\
examples:
  verl-engine check fsdp2
  verl-engine check fsdp2 --ranks 1 --only snapshots
  verl-engine check mine fused=true --json | jq .failed

docs/reference/conformance.md says what each check proves."""

NEEDED = ("torch", "numpy", "transformers")


def run(arguments: Sequence[str], program: str) -> int:
    """Run the checks and print a table, or one JSON object.

    Args:
        arguments: those after ``check``.
        program: for usage lines.
    Returns:
        0 if nothing failed, else 1.
    Raises:
        PluginError: no such backend, or what the kit needs is not installed.
        ConfigError: an argument does not fit.
    """
    options = _parse(arguments, program)
    settings = read_overrides(options.settings)
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginImportError(
            f"the conformance kit needs {', '.join(missing)}; install it with: "
            f"{pip_install('verl-engine-core[testing]')}"
        )
    _require_modules(options.name)
    try:
        from verl_engine.testing.conformance.kit import ConformanceKit  # only now: it is there

        checks = _chosen(options.only)
    except (ImportError, OSError) as cause:  # installed, but a library that it needs cannot be loaded, say
        raise PluginImportError(
            f"the conformance kit cannot be imported: {type(cause).__name__}: {cause}; see verl-engine doctor"
        ) from cause
    start = time.monotonic()
    with contextlib.redirect_stdout(sys.stderr):  # what a backend prints when it is loaded would spoil the JSON
        kit = ConformanceKit(options.name, settings, ranks=options.ranks, timeout_s=options.timeout)
        with kit:
            outcomes = _run_all(kit, checks, is_quiet=options.json)
    seconds = time.monotonic() - start
    if options.json:
        _print_json(options.name, kit, outcomes, seconds)
    else:
        from verl_engine.command.check_report import print_summary  # rich is slow to import

        print_summary(f"{options.name} ({kit.version}), {options.ranks} ranks", outcomes, seconds)
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def _require_modules(name: str) -> None:
    """Refuse a backend whose ranks could all but fail, each in its turn."""
    entry = find_plugin(BACKENDS_GROUP, name)
    if entry.missing_modules:
        raise PluginImportError(
            f"backend {name} needs the module {', '.join(entry.missing_modules)}, which cannot be found and is on no "
            f"package index; install it with: {how_to_get(entry) or entry.mend}"
        )


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, DESCRIPTION, EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="the backend, as `verl-engine backends` lists it")
    parser.add_argument(
        "settings", metavar="FIELD=VALUE", nargs="*", default=[], help="fields of the engine section, for every engine"
    )  # a default, lest argparse call them required
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="how many ranks, where a check wants several (default 2)"
    )
    parser.add_argument(
        "--only", action="append", metavar="CHECK", help="only checks whose name starts so; may be repeated"
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="for each step of a check (default 60)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    # Settings may stand before and after options.
    return parser.parse_intermixed_args(arguments)


def _chosen(prefixes: list[str] | None) -> list[Check]:
    from verl_engine.testing.conformance.catalogue import all_checks  # imports torch

    checks = [check for check in all_checks() if prefixes is None or check.name.startswith(tuple(prefixes))]
    if not checks:
        topics = ", ".join(sorted({check.name.partition("/")[0] for check in all_checks()}))
        raise ConfigError(f"--only {' '.join(prefixes or [])}: no check's name starts with it; topics are {topics}")
    return checks


def _run_all(kit: ConformanceKit, checks: list[Check], *, is_quiet: bool) -> list[Outcome]:
    if is_quiet:
        return [kit.run(check) for check in checks]
    from verl_engine.command.check_report import run_with_progress  # rich is slow to import

    return run_with_progress(kit, checks)


def _print_json(name: str, kit: ConformanceKit, outcomes: list[Outcome], seconds: float) -> None:
    import json  # not needed for the table

    found: dict[str, list[dict[str, Any]]] = {"passed": [], "failed": [], "skipped": []}
    for outcome in outcomes:
        entry: dict[str, Any] = {"check": outcome.check.name, "seconds": round(outcome.seconds, 2)}
        if outcome.status == "failed":
            entry.update(error=outcome.reason, details=outcome.details)
        elif outcome.status == "skipped":
            entry.update(reason=outcome.reason)
        found[outcome.status].append(entry)
    report = {"backend": name, "version": kit.version, "ranks": kit.ranks, "seconds": round(seconds, 1), **found}
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
