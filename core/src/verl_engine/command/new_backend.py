"""``verl-engine new-backend``: a complete, installable engine of one's own, to start from."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from verl_engine.command.backend_names import BackendNames
from verl_engine.command.backend_template import write_project
from verl_engine.contract.errors import ConfigError


def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the backend: lower-case letters, digits, - and _.")],
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to make; by default the name, in the current folder.")
    ] = None,
) -> None:
    """Write a new engine backend: an installable, typed package with a working engine for one process.

    It has a conformance test and a CI file too, and passes `verl-engine check` as it is; change it from there.
    docs/tutorial/write-a-backend.md explains every line of it.

    **Examples**

    `verl-engine new-backend my_engine` writes ./my-engine

    `verl-engine new-backend turbo --output src/turbo` writes src/turbo
    """
    names = BackendNames.of(name)
    folder = output or Path(names.distribution)
    if os.path.lexists(folder):
        raise ConfigError(f"--output={str(folder)!r} is there already; name a folder that does not exist")
    write_project(names, folder)
    _print_next_steps(names, folder)


def _print_next_steps(names: BackendNames, folder: Path) -> None:
    sys.stdout.write(
        f"Wrote {folder}: the engine backend {names.backend!r}, of the distribution {names.distribution!r}.\n"
        "\n"
        f"  cd {folder}\n"
        '  python -m pip install -e ".[dev]"\n'
        f"  verl-engine check {names.backend}\n"
    )
