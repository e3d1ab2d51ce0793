"""The arguments of ``verl-engine doctor``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from typing import TYPE_CHECKING

from verl_engine.command.doctor.examination import examine
from verl_engine.command.parser import command_parser

if TYPE_CHECKING:
    from collections.abc import Sequence

DESCRIPTION = """\
Look at this machine and what is installed, say what is wrong, and give the command that fixes it.

The exit code is 1 if something keeps the backend named by --backend from working (without --backend: if anything
installed cannot be used, but for backends that lack a module on no package index), else 0. Torch is imported in a
process of its own."""

EXAMPLES = """\
examples:
  verl-engine doctor                          everything
  verl-engine doctor --backend fsdp2          load one backend's hooks module, as a job would
  verl-engine doctor --backend megatron --patches    what its preparation of a process replaces, and why
  verl-engine doctor --json                   one object, for scripts"""


def run(arguments: Sequence[str], program: str) -> int:
    """Examine and print.

    Args:
        arguments: those after ``doctor``.
        program: for usage lines.
    Returns:
        1 if something is broken, else 0.
    """
    options = _parse(arguments, program)
    with contextlib.redirect_stdout(sys.stderr):  # what a backend prints when it is loaded would spoil the JSON
        found = examine(options.backend, options.ranks, options.timeout_s, with_patches=options.patches)
    if options.json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        from verl_engine.command.doctor.tables import print_examination  # rich is slow to import

        print_examination(found)
    return 0 if found.is_healthy else 1


def _parse(arguments: Sequence[str], program: str) -> argparse.Namespace:
    parser = command_parser(program, DESCRIPTION, EXAMPLES)
    parser.add_argument("--backend", metavar="NAME", help="look at one backend more closely")
    parser.add_argument("--patches", action="store_true", help="prepare a process and show what is patched in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=_positive,
        default=_ranks_of_environment(),
        help="training processes that are to run on this machine; by default LOCAL_WORLD_SIZE, or 1",
    )
    parser.add_argument(
        "--timeout-s",
        metavar="SECONDS",
        type=_positive,
        default=120,
        help="for importing torch, and for preparing a process (default: %(default)s)",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def _ranks_of_environment() -> int:
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(value)) if value.isdecimal() else 1
