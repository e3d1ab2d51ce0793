"""The front door of ``verl-engine``: finds the subcommand, runs it, and turns errors into messages.

It is plain argparse, not typer, and prints help with rich: importing typer takes 50 ms of the 80 ms that
`verl-engine backends` may take, argparse takes 8 ms. Subcommands of plugins are typer functions all the same.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

from verl_engine import __version__
from verl_engine.command.streams import flush_streams, open_closed_streams
from verl_engine.contract.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "verl-engine"
OWN_COMMANDS = {
    "backends": "plugins",
    "check": "check",
    "checkpoint": "checkpoint",
    "doctor": "doctor.command",
    "new-backend": "new_backend",
    "plugins": "plugins",
}
"""Module in this package for each subcommand of the core; it has ``run(arguments, program) -> exit code``."""
USER_ERROR = 2
BROKEN_PIPE = 141
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and end the process with its exit code.

    Args:
        arguments: without the program's name; by default those of the process.
    Raises:
        SystemExit: always. 0 is success, 2 an error that the user can put right, 130 an interruption with Ctrl-C.
    """
    open_closed_streams()
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Options in front of the subcommand are ours, all that follows is the subcommand's.
    split = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    options = _parse(words[:split])
    wants_traceback = options.debug or os.environ.get("VERL_ENGINE_DEBUG", "") not in {"", "0"}
    try:
        code = _dispatch(options, words[split:])
    except EngineError as error:
        _print_error(error, wants_traceback)
        code = USER_ERROR
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # as in `verl-engine plugins | head`
        code = BROKEN_PIPE
    except OSError as error:  # such as a full disk
        failure = EngineError(str(error))
        failure.__cause__ = error
        _print_error(failure, wants_traceback)
        code = USER_ERROR
    if (reason := flush_streams()) is not None and code == 0:
        _print_error(EngineError(reason), wants_traceback)
        code = USER_ERROR
    sys.exit(code)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        PROGRAM, usage=f"{PROGRAM} [--debug] COMMAND [ARGUMENTS]", add_help=False, allow_abbrev=False
    )
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-V", "--version", action="store_true")
    parser.add_argument("--debug", action="store_true")
    return parser.parse_args(words)


def _dispatch(options: argparse.Namespace, words: Sequence[str]) -> int:
    if options.version:
        sys.stdout.write(f"{PROGRAM} {__version__}\n")
        return 0
    if options.help or not words:
        from verl_engine.command.overview import print_overview  # rich is slow to import

        print_overview()
        return 0 if options.help else USER_ERROR
    module = OWN_COMMANDS.get(words[0])
    if module is not None:
        import importlib  # only what is called is imported

        command = importlib.import_module(f"verl_engine.command.{module}")
        return int(command.run(words[1:], f"{PROGRAM} {words[0]}"))
    from verl_engine.command.contributed import run_contributed  # only what is called is imported

    return run_contributed(words[0], words[1:], PROGRAM)


_TOLD_IN_FULL: Final = {"pydantic_core", "omegaconf", "yaml"}
"""Libraries whose complaints about a config are in the message already; their tracebacks would only puzzle."""


def _print_error(error: EngineError, wants_traceback: bool) -> None:
    from rich.console import Console  # slow to import and only needed for errors
    from rich.text import Text  # as above

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    with suppress(OSError, SystemExit):  # rich exits where nobody reads
        console.print(Text.assemble(("error: ", "bold red"), (str(error) or type(error).__name__, "red")))
    if wants_traceback:
        import traceback  # as above

        traceback.print_exception(error)
    elif error.__cause__ is not None and type(error.__cause__).__module__.partition(".")[0] not in _TOLD_IN_FULL:
        console.print(Text("The whole traceback: set VERL_ENGINE_DEBUG=1 and run it again.", style="dim"))
