"""What the doctor found, for people."""

from collections.abc import Iterable, Iterator

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from verl_engine.command.doctor.examination import Examination
from verl_engine.command.doctor.findings import Finding
from verl_engine.command.doctor.patch_report import PatchReport
from verl_engine.host.catalog import PluginEntry

_STYLES = {"error": "bold red", "warning": "yellow"}


def print_examination(found: Examination) -> None:
    """Print tables, then what is wrong with the commands that fix it."""
    console = Console(highlight=False)
    console.print(Group(_machine(found), Text(), _plugins(found), Text(), _environment(found)))
    if found.patches is not None:
        console.print()
        for report in found.patches:
            console.print(_patches(report))
    console.print()
    # As lines, not in a table, where columns would cut the commands: they are there to be copied.
    for line in _verdict(found):
        console.print(line, soft_wrap=True)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold", show_header=bool(headings))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _machine(found: Examination) -> Table:
    table = _table("This machine")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    machine = found.machine
    total, free = machine["shared_memory_bytes"], machine["shared_memory_free_bytes"]
    rows = {
        "Python": f"{machine['python']} ({machine['executable']})",
        "platform": machine["platform"],
        "cores": str(machine["cores"]),
        "shared memory": f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free" if total is not None else "none",
        "devices": "; ".join(f"{kind}: {', '.join(names)}" for kind, names in found.devices.items()),
        "packages": ", ".join(f"{name} {version}" for name, version in found.packages.items()),
    }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def _plugins(found: Examination) -> Table:
    table = _table("Plugins", "kind", "name", "distribution", "version", "devices", "status")
    for entry in found.plugins:
        table.add_row(*_plugin_cells(entry))
    return table


def _plugin_cells(entry: PluginEntry) -> Iterator[Text]:
    for cell in (entry.kind.name, entry.name, entry.distribution, entry.version, " ".join(entry.devices)):
        yield Text(cell)
    if entry.is_incomplete:
        yield Text("incomplete, see below", "yellow")
    else:
        yield Text("broken, see below", "bold red") if entry.problem else Text("ready", "green")


def _environment(found: Examination) -> Table:
    table = _table("Environment", "variable", "value", "hint")
    for variable in found.environment:
        value = Text("not set", "dim") if variable.value is None else Text(variable.value)
        table.add_row(Text(variable.name), value, Text(variable.hint or "", "yellow"))
    return table


def _patches(report: PatchReport) -> Table | Text:
    if report.error:
        return Text(f"Backend {report.backend}: its preparation failed, see below.")
    if not report.patches and not report.waiting:
        return Text(f"Backend {report.backend} patches nothing.")
    table = _table(f"What backend {report.backend} patches", "name", "when", "replacement", "why")
    for patch in report.patches:
        table.add_row(*map(Text, (f"{patch.module}:{patch.name}", patch.how, patch.replacement, patch.reason)))
    for name, why in report.declared.items():
        table.add_row(Text(name), Text("when it is imported"), Text(), Text(why))
    declared = {name.partition(":")[0] for name in report.declared}
    for module in report.waiting:
        if module not in declared:
            table.add_row(Text(module), Text("when it is imported"), Text(), Text())
    return table


def _verdict(found: Examination) -> Iterator[Text]:
    broken = [finding for finding in found.findings if finding.severity == "error"]
    odd = [finding for finding in found.findings if finding.severity == "warning"]
    yield from _lines(broken)
    yield from _lines(odd)
    subject = f"Backend {found.backend}" if found.backend else "Everything installed"
    if found.is_healthy:
        lacking = found.backend is None and any(entry.is_incomplete for entry in found.plugins)
        yield Text(f"{subject} can be used{', but for what is incomplete' * lacking}.", "bold green")
    else:
        yield Text(f"{subject if found.backend else 'Something installed'} cannot be used; see above.", "bold red")


def _lines(findings: Iterable[Finding]) -> Iterator[Text]:
    for finding in findings:
        yield Text.assemble((f"{finding.severity}: ", _STYLES[finding.severity]), f"{finding.subject}: {finding.text}")
        if finding.fix:
            yield Text.assemble("  ", (finding.fix, "bold"))
