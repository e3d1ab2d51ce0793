"""The group of all commands, the core's own and those of plugins: one way to call them, one look of their help."""

import sys
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from verl_engine import __version__
from verl_engine.command.own_commands import OWN_COMMANDS
from verl_engine.contract.errors import HookError, PluginError, PluginImportError
from verl_engine.contract.kinds import COMMAND
from verl_engine.host.catalog import PluginEntry, list_plugins
from verl_engine.host.install_hints import missing_line
from verl_engine.host.loading import load_plugin

HELP_OPTIONS: Final = ["-h", "--help"]
_COMPLETION_OPTIONS: Final = {"install_completion", "show_completion"}


class Commands(TyperGroup):
    """Finds a command by name, and imports only that one."""

    def list_commands(self, ctx: Any) -> list[str]:
        """List the names of all commands."""
        del ctx
        return sorted({*OWN_COMMANDS, *(entry.name for entry in list_plugins(COMMAND))})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; see `find_command`."""
        try:
            return find_command(cmd_name)
        except PluginError:
            if ctx.resilient_parsing:  # completion: what is broken is not offered
                return None
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print what can be done, and how to start."""
        del ctx, formatter
        from verl_engine.command.overview import print_overview  # rich is slow to import

        print_overview()


app = typer.Typer(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": HELP_OPTIONS},
    rich_markup_mode="markdown",
)


@app.callback()
def _root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V")] = False,
    debug: Annotated[bool, typer.Option("--debug")] = False,
) -> None:
    del debug  # `main` looks for it
    if version:
        sys.stdout.write(f"verl-engine {__version__}\n")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        sys.stdout.write(ctx.get_help())
        raise typer.Exit(2)


def root_command() -> Any:
    """Make the command of which all others are subcommands; its `main` ends the process."""
    return typer.main.get_command(app)


def find_command(name: str) -> Any:
    """Import a command by name, rather the core's own than a plugin's; a PluginError where that cannot be done."""
    entry: PluginEntry | None = None
    if name in OWN_COMMANDS:
        module, _, attribute = OWN_COMMANDS[name][0].partition(":")
        found: object = getattr(import_module(f"verl_engine.command.{module}"), attribute)
    else:
        entry, found, _ = load_plugin(COMMAND, name)
    return _guarded(_as_command(found, name), entry)


def _as_command(found: object, name: str) -> Any:
    """Make a command of a typer application or a function with type hints; one of click keeps its own parser."""
    if isinstance(found, TyperCommand | TyperGroup):
        return _one_look(found)
    if isinstance(found, typer.Typer):
        return _one_look(typer.main.get_command(found))
    target: Any = found
    if hasattr(target, "main") and hasattr(target, "context_settings"):
        return _of_click(target, name)
    if not callable(found):
        raise HookError(f"command {name!r} points to {found!r}; it must be a function, or a typer or click command")
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(name)(target)
    return _one_look(typer.main.get_command(single))


def _of_click(command: Any, name: str) -> Any:
    """Hand all arguments on to a command of click, of which typer has a copy of its own."""
    command.context_settings.setdefault("help_option_names", HELP_OPTIONS)
    _guarded(command, None)
    outer = typer.Typer(add_completion=False)
    settings = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

    @outer.command(name, add_help_option=False, context_settings=settings)
    def hand_on(ctx: typer.Context) -> None:
        command.main(args=list(ctx.args), prog_name=ctx.command_path)

    return typer.main.get_command(outer)


def _one_look(command: Any) -> Any:
    """Show no type beside a switch, which takes no value, and completion as an option of the root only."""
    command.params = [each for each in command.params if each.name not in _COMPLETION_OPTIONS]
    help_option = command.get_help_option(typer.Context(command, help_option_names=HELP_OPTIONS))
    for each in (*command.params, help_option):
        if getattr(each, "is_flag", False) and each.metavar is None:
            each.metavar = ""
    for child in getattr(command, "commands", {}).values():
        _one_look(child)
    return command


def _guarded(command: Any, entry: PluginEntry | None) -> Any:
    """Have a whole number that a command returns be the exit status, and say how to install what a plugin lacks."""
    invoke = command.invoke

    def guarded(ctx: Any) -> Any:
        try:
            value = invoke(ctx)
        except ImportError as cause:  # a command imports what is heavy only when it runs
            if entry is None or not entry.missing:
                raise
            raise PluginImportError(
                f"{entry.label} cannot run: {type(cause).__name__}: {cause}{missing_line(entry.missing)}"
            ) from cause
        if type(value) is int:
            ctx.exit(value)
        return value

    command.invoke = guarded
    return command
