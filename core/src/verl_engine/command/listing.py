"""The installed plugins, as a table or as JSON. Imports neither typer nor, for JSON, rich: it is to be quick."""

import sys

from verl_engine.contract.kinds import BACKEND
from verl_engine.host.catalog import PluginEntry, list_plugins
from verl_engine.host.install_hints import pip_install


def print_json(kind: str | None) -> None:
    """Print one list of objects, of one kind or of all."""
    import json  # not needed for the table

    sys.stdout.write(json.dumps([entry.as_json() for entry in _list(kind)], indent=2) + "\n")


def _list(kind: str | None) -> list[PluginEntry]:
    if kind == BACKEND.name:
        return list_plugins(BACKEND)
    from verl_engine.host.kinds import all_kinds, find_kind  # backends are listed without them

    kinds = all_kinds() if kind is None else [find_kind(kind, "--kind")]
    return [entry for each in kinds for entry in list_plugins(each)]


def print_table(kind: str | None) -> None:
    """Print a table, and below it the command that fixes each plugin that cannot be used."""
    from rich.console import Console  # slow to import; --json does without
    from rich.table import Table  # as above
    from rich.text import Text  # as above

    console, entries = Console(highlight=False), _list(kind)
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
    if not list_plugins(BACKEND):
        console.print("No engine backend is installed yet. A good first one:")
        console.print(Text(f"  {pip_install('verl-fsdp')}", style="bold"), soft_wrap=True)
