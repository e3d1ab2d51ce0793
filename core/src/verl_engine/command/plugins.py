"""``verl-engine plugins``: what is installed of each kind, without importing any plugin."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from verl_engine.command.parser import command_parser
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.catalog import list_plugins
from verl_engine.host.install_hints import pip_install

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_engine.host.catalog import PluginEntry

DESCRIPTION = """\
List the installed plugins of every kind: engine backends, observers, commands, and the kinds that packages
bring. No plugin is imported: all is read from metadata. `verl-engine backends` lists the backends alone.

The name is what you write in a job, such as `engine.backend`. The status is `ready`, or says what is wrong;
the command that fixes it follows."""

EXAMPLES = """\
examples:
  verl-engine plugins                             a table
  verl-engine plugins --kind rollout              of one kind
  verl-engine plugins --json | jq '.[].name'      a list of objects, for scripts"""


def run(arguments: Sequence[str], program: str) -> int:
    """Print the table or the JSON list.

    Args:
        arguments: those after ``plugins``, or after ``backends``, which is short for ``plugins --kind backend``.
        program: for usage lines.
    Returns:
        The exit code.
    """
    parser = command_parser(program, DESCRIPTION, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    only_backends = program.endswith("backends")
    if not only_backends:
        parser.add_argument("--kind", metavar="KIND", help="only those of one kind, such as backend or rollout")
    options = parser.parse_args(arguments)
    entries = list_plugins(BACKEND) if only_backends else _list(options.kind)
    if options.json:
        _print_json(entries)
    else:
        _print_table(entries)
    return 0


def _list(kind: str | None) -> list[PluginEntry]:
    from verl_engine.host.kinds import all_kinds, find_kind  # backends are listed without them

    kinds = all_kinds() if kind is None else [find_kind(kind, "--kind")]
    return [entry for each in kinds for entry in list_plugins(each)]


def _print_json(entries: list[PluginEntry]) -> None:
    import json  # not needed for the table

    sys.stdout.write(json.dumps([entry.as_json() for entry in entries], indent=2) + "\n")


def _print_table(entries: list[PluginEntry]) -> None:
    from rich.console import Console  # slow to import; --json does without
    from rich.table import Table  # as above
    from rich.text import Text  # as above

    console = Console(highlight=False)
    table = Table(title="Installed plugins", title_justify="left", header_style="bold")
    for heading in ("kind", "name", "distribution", "version", "API", "devices", "status"):
        table.add_column(heading, overflow="fold")
    for entry in entries:
        api = "?" if entry.api_version is None else str(entry.api_version)
        style = "yellow" if entry.problem else "green"
        cells = (entry.kind.name, entry.name, entry.distribution, entry.version, api, " ".join(entry.devices) or "?")
        table.add_row(*map(Text, cells), Text(entry.problem or "ready", style=style))
    if entries:
        console.print(table)
    # Below the table, where no column cuts them: commands are there to be copied.
    for entry in entries:
        if entry.fix is not None:
            console.print(Text.assemble(f"{entry.kind.name} {entry.name}: ", (entry.fix, "bold")), soft_wrap=True)
    if not any(entry.kind == BACKEND for entry in list_plugins(BACKEND)):
        console.print("No engine backend is installed yet. A good first one:")
        console.print(Text(f"  {pip_install('verl-fsdp')}", style="bold"), soft_wrap=True)
