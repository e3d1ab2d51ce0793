"""``verl-engine new-backend``: a complete, installable engine of one's own, to start from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from verl_engine.command.backend_names import BackendNames
from verl_engine.command.backend_template import write_project
from verl_engine.command.parser import command_parser
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """\
Write a new engine backend: an installable, typed package with a working engine for one process, its conformance test
and a CI file. It passes `verl-engine check` as it is; change it from there.

See docs/tutorial/write-a-backend.md, which explains every line of it."""

EXAMPLES = """\
examples:
  verl-engine new-backend my_engine                   writes ./my-engine
  verl-engine new-backend turbo --output src/turbo    writes src/turbo"""


def run(arguments: Sequence[str], program: str) -> int:
    """Write the project.

    Args:
        arguments: those after ``new-backend``.
        program: for usage lines.
    Returns:
        The exit code.
    Raises:
        ConfigError: the name cannot be used, or the folder is there already; nothing was written.
    """
    parser = command_parser(program, DESCRIPTION, EXAMPLES)
    parser.add_argument("name", metavar="NAME", help="name of the backend: lower-case letters, digits, - and _")
    parser.add_argument("--output", metavar="DIR", help="folder to make; by default the name, in the current folder")
    options = parser.parse_args(arguments)
    names = BackendNames.of(options.name)
    folder = Path(options.output or names.distribution)
    if os.path.lexists(folder):
        raise ConfigError(f"--output={str(folder)!r} is there already; name a folder that does not exist")
    write_project(names, folder)
    _print_next_steps(names, folder)
    return 0


def _print_next_steps(names: BackendNames, folder: Path) -> None:
    sys.stdout.write(
        f"Wrote {folder}: the engine backend {names.backend!r}, of the distribution {names.distribution!r}.\n"
        "\n"
        f"  cd {folder}\n"
        '  python -m pip install -e ".[dev]"\n'
        f"  verl-engine check {names.backend}\n"
    )
