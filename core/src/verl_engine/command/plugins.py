"""``verl-engine plugins`` and ``verl-engine backends``: what is installed, without importing any plugin."""

from typing import Annotated

import typer

from verl_engine.command.listing import print_json, print_table

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON list instead of a table.")]


def plugins(
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="Only those of one kind, such as `backend` or `rollout`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the installed plugins: engine backends, observers, commands, and the kinds that packages bring.

    No plugin is imported: all is read from metadata. The name is what you write in a job, such as `engine.backend`.
    The status is `ready`, or says what is wrong; below stands the command that fixes it.

    **Examples**

    `verl-engine plugins --kind rollout`

    `verl-engine plugins --json | jq '.[].name'`
    """
    (print_json if as_json else print_table)(kind)


def backends(as_json: AsJson = False) -> None:
    """List the installed engine backends; short for `verl-engine plugins --kind backend`."""
    (print_json if as_json else print_table)("backend")
