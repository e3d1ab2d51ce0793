"""``verl-engine check``: the kit of its kind on an installed plugin, most often a backend."""

import contextlib
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, TextIO

import typer

from verl_engine.command.doctor.plugins import how_to_get
from verl_engine.contract.config_file import read_overrides
from verl_engine.contract.errors import ConfigError, PluginImportError, UnsupportedError
from verl_engine.contract.kinds import KindSpec
from verl_engine.host.install_hints import pip_install
from verl_engine.host.kinds import all_kinds, find_kind
from verl_engine.host.loading import find_plugin
from verl_engine.testing.kits import Kit

NEEDED = ("torch", "numpy", "transformers")


def check(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The plugin, as `verl-engine plugins` lists it.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="Fields of its section, for every check.", show_default=False),
    ] = None,
    kind: Annotated[str, typer.Option(metavar="KIND", help="Of plugin; `verl-engine plugins` lists them.")] = "backend",
    ranks: Annotated[
        int | None, typer.Option(metavar="N", help="How many ranks, where a check wants several.", show_default=False)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="CHECK", help="Only checks whose name starts so; may be repeated.", show_default=False),
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For each step of a check.")] = 60.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each check when it ends, and one for all.")
    ] = False,
) -> int:
    """Prove an installed plugin right by the kit of its kind; its source is not needed.

    For an engine backend that is gradients, optimizer, snapshots, checkpoints and more, on tiny models, against plain
    transformers, in about a minute on a laptop. What the plugin declares it cannot do is skipped with its reason; what
    it cannot do without saying so fails. The exit status is 0 only if nothing failed.

    **Examples**

    `verl-engine check fsdp2`

    `verl-engine check fsdp2 --ranks 1 --only snapshots`

    `verl-engine check mine fused=true --json | tail -n 1 | jq .failed`

    docs/reference/conformance.md says what each check proves.
    """
    section = read_overrides(settings or ())
    found = find_kind(kind, "--kind")
    kit_class, checks = _load_kit(found, only)
    _require_modules(found, name)
    start, stdout = time.monotonic(), sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # what a plugin prints when it is loaded would spoil the JSON
        given = {} if ranks is None else {"ranks": ranks}
        kit = kit_class(name, section, timeout_s=timeout, **given)
        with contextlib.closing(kit):
            outcomes = _run_all(kit, checks, stdout if as_json else None)
    seconds = time.monotonic() - start
    if as_json:
        _print_json(kind, name, kit, outcomes, seconds)
    else:
        from verl_engine.command.check_report import print_summary  # rich is slow to import

        number = f"{kit.ranks} rank{'s' * (kit.ranks > 1)}"
        print_summary(f"{name} ({kit.version}), {number}", outcomes, seconds)
    return 1 if any(outcome.status == "failed" for outcome in outcomes) else 0


def _load_kit(kind: KindSpec, prefixes: list[str] | None) -> tuple[type[Kit], list[Any]]:
    """Import the kit of a kind, and choose from its checks; a PluginError where there is none that can be imported."""
    if not kind.kit:
        having = ", ".join(each.name for each in all_kinds() if each.kit)
        raise UnsupportedError(f"--kind={kind.name}: no kit proves plugins of this kind; kinds with one: {having}")
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise PluginImportError(
            f"the kit needs {', '.join(missing)}; install it with: {pip_install('verl-engine-core[testing]')}"
        )
    module, _, attribute = kind.kit.partition(":")
    try:
        kit_class: type[Kit] = getattr(importlib.import_module(module), attribute)
        return kit_class, _chosen(kit_class.all_checks(), prefixes)
    except (ImportError, OSError, AttributeError) as cause:  # a library that it needs cannot be loaded, say
        raise PluginImportError(
            f"the kit of kind {kind.name} cannot be imported: {type(cause).__name__}: {cause}; see verl-engine doctor"
        ) from cause


def _require_modules(kind: KindSpec, name: str) -> None:
    entry = find_plugin(kind, name)
    if entry.missing_modules:
        raise PluginImportError(
            f"{kind.title} {name} needs the module {', '.join(entry.missing_modules)}, which cannot be found and is on "
            f"no package index; install it with: {how_to_get(entry) or entry.fix}"
        )


def _chosen(every: Sequence[Any], prefixes: list[str] | None) -> list[Any]:
    checks = [check for check in every if prefixes is None or check.name.startswith(tuple(prefixes))]
    if not checks:
        topics = ", ".join(sorted({check.name.partition("/")[0] for check in every}))
        raise ConfigError(f"--only {' '.join(prefixes or [])}: no check's name starts with it; topics are {topics}")
    return checks


def _run_all(kit: Kit, checks: list[Any], stdout: TextIO | None) -> list[Any]:
    """Run checks one after the other; each is told when it ends, as JSON where that is asked for."""
    if stdout is None:
        from verl_engine.command.check_report import run_with_progress  # rich is slow to import

        return run_with_progress(kit, checks)
    outcomes = []
    for check in checks:
        outcomes.append(kit.run(check))
        stdout.write(json.dumps({"status": outcomes[-1].status, **_entry(outcomes[-1])}) + "\n")
        stdout.flush()
    return outcomes


def _print_json(kind: str, name: str, kit: Kit, outcomes: list[Any], seconds: float) -> None:
    found: dict[str, list[dict[str, Any]]] = {"passed": [], "failed": [], "skipped": []}
    for outcome in outcomes:
        found[outcome.status].append(_entry(outcome))
    report = {kind: name, "version": kit.version, "ranks": kit.ranks, "seconds": round(seconds, 1), **found}
    sys.stdout.write(json.dumps(report) + "\n")


def _entry(outcome: Any) -> dict[str, Any]:
    entry: dict[str, Any] = {"check": outcome.check.name, "seconds": round(outcome.seconds, 2)}
    if outcome.status == "failed":
        entry.update(error=outcome.reason, details=outcome.details)
    elif outcome.status == "skipped":
        entry.update(reason=outcome.reason)
    return entry
