"""``verl-engine backends``: the installed engine backends, without importing any."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING

from verl_engine.command.parser import command_parser
from verl_engine.contract.names import BACKENDS_GROUP, PLUGIN_API_VERSION
from verl_engine.host.catalog import list_plugins, pip_install

if TYPE_CHECKING:
    from collections.abc import Sequence

    from verl_engine.host.catalog import PluginEntry

DESCRIPTION = """\
List the installed engine backends. Nothing of theirs is imported: all is read from metadata.

The name is what you write in a job as `engine.backend`. The status is `ready`, or says what is
wrong and which command mends it."""

EXAMPLES = """\
examples:
  verl-engine backends                            a table
  verl-engine backends --json | jq '.[].name'     a list of objects, for scripts"""


def run(arguments: Sequence[str], program: str) -> int:
    """Print the table or the JSON list.

    Args:
        arguments: those after ``backends``.
        program: for usage lines.
    Returns:
        The exit code.
    """
    parser = command_parser(program, DESCRIPTION, EXAMPLES)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    options = parser.parse_args(arguments)
    entries = list_plugins(BACKENDS_GROUP)
    counts = Counter(entry.name for entry in entries)
    rows = [(entry, *_status(entry, counts[entry.name])) for entry in entries]
    if options.json:
        _print_json(rows)
    else:
        _print_table(rows)
    return 0


def _status(entry: PluginEntry, num_same_name: int) -> tuple[str, str | None]:
    """Say whether the backend is ready, and which command mends it if not."""
    if num_same_name > 1:
        return "name taken twice", f"python -m pip uninstall {entry.distribution}"
    if not entry.fits_api:
        return f"needs plugin API {entry.api_version}, this core has {PLUGIN_API_VERSION}", entry.mend
    if entry.missing:
        return f"missing {', '.join(entry.missing)}", entry.mend
    if entry.missing_modules:
        return f"missing module {', '.join(entry.missing_modules)}", entry.mend
    return "ready", None


def _print_json(rows: list[tuple[PluginEntry, str, str | None]]) -> None:
    import json  # not needed for the table

    objects = [
        {
            "name": entry.name,
            "distribution": entry.distribution,
            "version": entry.version,
            "plugin_api_version": entry.api_version,
            "devices": list(entry.devices),
            "status": status,
            "missing_requirements": list(entry.missing),
            "missing_modules": list(entry.missing_modules),
            "mend": mend,
        }
        for entry, status, mend in rows
    ]
    sys.stdout.write(json.dumps(objects, indent=2) + "\n")


def _print_table(rows: list[tuple[PluginEntry, str, str | None]]) -> None:
    from rich.console import Console  # slow to import; --json does without
    from rich.table import Table  # as above
    from rich.text import Text  # as above

    console = Console(highlight=False)
    if not rows:
        console.print("No engine backend is installed yet. A good first one:")
        console.print(Text(f"  {pip_install('verl-fsdp')}", style="bold"), soft_wrap=True)
        return
    table = Table(title="Engine backends", title_justify="left", header_style="bold")
    for heading in ("name", "distribution", "version", "API", "devices", "status"):
        table.add_column(heading, overflow="fold")
    for entry, status, _ in rows:
        api = "?" if entry.api_version is None else str(entry.api_version)
        style = "green" if status == "ready" else "yellow"
        cells = (entry.name, entry.distribution, entry.version, api, " ".join(entry.devices) or "?")
        table.add_row(*(Text(cell) for cell in cells), Text(status, style=style))
    console.print(table)
    # Below the table, where no column cuts them: commands are there to be copied.
    for entry, _, mend in rows:
        if mend is not None:
            console.print(Text.assemble(f"{entry.name}: ", (mend, "bold")), soft_wrap=True)
