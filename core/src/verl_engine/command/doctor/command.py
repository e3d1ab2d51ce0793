"""The arguments of ``verl-engine doctor``."""

import contextlib
import json
import os
import sys
from typing import Annotated

import typer

from verl_engine.command.doctor.examination import examine


def doctor(
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Speak of one backend alone, and load it as a job would.")
    ] = None,
    patches: Annotated[
        bool, typer.Option("--patches", help="Prepare a process and show what is patched in it, and why.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Training processes that are to run on this machine; by default LOCAL_WORLD_SIZE, or 1.",
        ),
    ] = None,
    timeout_s: Annotated[
        int, typer.Option(min=1, metavar="SECONDS", help="For importing torch, and for preparing a process.")
    ] = 120,
) -> int:
    """Look at this machine and what is installed, say what is wrong, and give the command that fixes it.

    The exit status is 1 if something keeps the backend named by --backend from working (without --backend: if anything
    installed cannot be used, but for backends that lack a module on no package index), else 0. Torch is imported in a
    process of its own.

    **Examples**

    `verl-engine doctor`

    `verl-engine doctor --backend megatron --patches`

    `verl-engine doctor --json | jq .ok`
    """
    with contextlib.redirect_stdout(sys.stderr):  # what a backend prints when it is loaded would spoil the JSON
        launched = os.environ.get("LOCAL_WORLD_SIZE", "")
        num_ranks = ranks or (int(launched) if launched.isdecimal() else 0) or 1
        found = examine(backend, num_ranks, timeout_s, with_patches=patches)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        from verl_engine.command.doctor.tables import print_examination  # rich is slow to import

        print_examination(found)
    return 0 if found.is_healthy else 1
