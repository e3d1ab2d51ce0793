"""The entry point of ``verl-engine``: runs the command, turns errors into messages, and ends with its exit status."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, NoReturn

from verl_engine.command.streams import flush_streams, open_closed_streams
from verl_engine.contract.errors import EngineError

PROGRAM = "verl-engine"
USER_ERROR = 2
BROKEN_PIPE = 141
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command, by default with the arguments of the process, and end the process.

    Raises:
        SystemExit: always. 0 is success, 2 an error that the user can put right, 130 an interruption with Ctrl-C.
    """
    open_closed_streams()
    words = sys.argv[1:] if arguments is None else list(arguments)
    # Options in front of the subcommand are ours, all that follows is the subcommand's.
    split = next((index for index, word in enumerate(words) if not word.startswith("-")), len(words))
    wants_traceback = "--debug" in words[:split] or os.environ.get("VERL_ENGINE_DEBUG", "") not in {"", "0"}
    try:
        code = _run(words)
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


def _run(words: list[str]) -> int:
    if words in (["plugins", "--json"], ["backends", "--json"]):
        from verl_engine.command.listing import print_json  # only what is called is imported

        print_json("backend" if words[0] == "backends" else None)
        return 0
    from verl_engine.command.commands import root_command  # as above

    try:
        root_command().main(args=words, prog_name=PROGRAM)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


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
