"""How ``verl-engine check`` shows its progress and its findings."""

from collections import Counter
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from verl_engine.testing.kits import Kit

STYLES = {"passed": "green", "failed": "bold red", "skipped": "yellow"}


def run_with_progress(kit: Kit, checks: list[Any]) -> list[Any]:
    """Run checks one after the other; on a terminal, say which is running, and at once what failed."""
    console = Console(highlight=False, stderr=True)
    outcomes: list[Any] = []
    with Live(console=console, transient=True, refresh_per_second=8) as live:
        for number, check in enumerate(checks, start=1):
            if console.is_terminal:
                failed = sum(outcome.status == "failed" for outcome in outcomes)
                counts = f"{number}/{len(checks)}" + (f", {failed} failed" if failed else "")
                live.update(Spinner("dots", Text(f"{counts} {check.name}: {check.proves}")))
            outcomes.append(kit.run(check))
            if console.is_terminal and outcomes[-1].status == "failed":
                console.print(Text(f"{check.name} failed: {outcomes[-1].reason}", style=STYLES["failed"]))
    return outcomes


def print_summary(title: str, outcomes: list[Any], seconds: float) -> None:
    """Print a row for each check, the tracebacks of what failed, and the counts."""
    console = Console(highlight=False)
    table = Table(title=f"Conformance of {title}", title_justify="left", header_style="bold")
    for heading in ("check", "result", "what it proves, or what is wrong"):
        table.add_column(heading, overflow="fold")
    for outcome in outcomes:
        table.add_row(
            Text(outcome.check.name),
            Text(outcome.status, style=STYLES[outcome.status]),
            Text((outcome.reason or outcome.check.proves).replace("``", "`"), style="" if outcome.reason else "dim"),
        )
    console.print(table)
    for outcome in outcomes:
        if outcome.details:
            console.print(Text(f"\n{outcome.check.name}", style="bold red"))
            console.print(Text(outcome.details.rstrip()), soft_wrap=True)
    counts: Counter[str] = Counter(outcome.status for outcome in outcomes)
    parts = [Text(f"{counts[status]} {status}", style=style) for status, style in STYLES.items()]
    console.print(Text.assemble("\n", Text(", ").join(parts), f" in {seconds:.0f} s"))
