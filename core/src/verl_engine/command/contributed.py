"""Subcommands that plugins add, by the entry-point group ``verl_engine.commands``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from verl_engine.contract.errors import HookError, PluginImportError
from verl_engine.contract.kinds import COMMAND
from verl_engine.host.install_hints import missing_line
from verl_engine.host.loading import load_plugin

if TYPE_CHECKING:
    from collections.abc import Sequence


@runtime_checkable
class _Runnable(Protocol):
    """A command of click, or of typer, which brings its own copy of click."""

    def main(self, args: Sequence[str], prog_name: str) -> Any:  # whatever the command returns
        """Parse the arguments, run, and end the process with the exit code."""


def run_contributed(name: str, arguments: Sequence[str], program: str) -> int:
    """Import one plugin's subcommand and run it.

    Args:
        name: the entry point's name.
        arguments: what follows the name.
        program: put before the name in usage lines.
    Returns:
        The exit code, where the command does not end the process with one of its own.
    Raises:
        PluginError: the subcommand is unknown, cannot be imported, or is no command.
    """
    plugin = load_plugin(COMMAND, name)
    entry = plugin.entry
    command = as_command(plugin.plugin, name)
    try:
        command.main(args=list(arguments), prog_name=f"{program} {name}")
    except ImportError as cause:  # a command imports what is heavy only when it runs
        if not entry.missing:
            raise
        raise PluginImportError(
            f"{entry.label} cannot run: {type(cause).__name__}: {cause}{missing_line(entry.missing)}"
        ) from cause
    return 0


def as_command(found: object, name: str) -> _Runnable:
    """Take a click or typer command as it is, and make one of a plain function with type hints.

    Raises:
        HookError: it is none of these.
    """
    import typer  # slow to import

    if isinstance(found, typer.Typer):
        return cast("_Runnable", typer.main.get_command(found))
    if isinstance(found, _Runnable):
        return found
    if not callable(found):
        raise HookError(f"command {name!r} points to {found!r}; it must be a function, or a typer or click command")
    app = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    app.command(name)(found)
    return cast("_Runnable", typer.main.get_command(app))
