"""What ``verl-engine --help`` prints: what can be done, and how to start."""

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from verl_engine.command.own_commands import OWN_COMMANDS
from verl_engine.contract.kinds import BACKEND, COMMAND
from verl_engine.host.catalog import list_plugins
from verl_engine.host.install_hints import pip_install

OPTIONS = {
    "--help, -h": "Show this.",
    "--version, -V": "Show the version of verl-engine-core.",
    "--debug": "Show the whole traceback of an error; so does VERL_ENGINE_DEBUG=1.",
    "--install-completion": "Have your shell complete commands and options; --show-completion prints how.",
}


def print_overview() -> None:
    """Print usage, commands, options and the first steps."""
    Console(highlight=False).print(
        Group(
            Text.assemble("\n ", ("Usage: ", "bold yellow"), ("verl-engine [OPTIONS] COMMAND [ARGUMENTS]", "bold")),
            Padding("Post-train language models with an engine that you choose by name.", 1),
            _panel("Commands", _commands()),
            _panel("Options", _table(OPTIONS)),
            _panel("Start here", _first_steps()),
        )
    )


def _panel(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim", padding=(0, 1))


def _table(rows: dict[str, str]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, show_edge=False, pad_edge=False)
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    for name, meaning in rows.items():
        table.add_row(Text(name), Text(meaning))
    return table


def _commands() -> Table:
    rows = {name: about for name, (_, about) in OWN_COMMANDS.items()}
    entries = [entry for entry in list_plugins(COMMAND) if entry.name not in OWN_COMMANDS]
    for distribution in dict.fromkeys(entry.distribution for entry in entries):
        own = [entry for entry in entries if entry.distribution == distribution]
        about = f"{own[0].summary} ({distribution} {own[0].version})".strip()
        rows[", ".join(entry.name for entry in own)] = f"{about} To fix: {own[0].fix}" if own[0].fix else about
    if not entries:
        rows["train, sft"] = f"Not installed yet: {pip_install('verl-async')}"
    return _table(rows)


def _first_steps() -> Text:
    steps = {}
    if not list_plugins(BACKEND):
        steps[pip_install("verl-fsdp")] = "install an engine"
    steps["verl-engine backends"] = "see which engines are ready"
    steps["verl-engine train --help"] = "what a command takes"
    steps["verl-engine train RECIPE.yaml --output DIR --dry-run"] = "check a whole job without starting it"
    steps["verl-engine train RECIPE.yaml engine.learning_rate=1e-4 --output DIR"] = "run it, with a field overridden"
    return Text("\n").join(Text.assemble((f"# {why}\n", "dim"), (step, "bold cyan")) for step, why in steps.items())
