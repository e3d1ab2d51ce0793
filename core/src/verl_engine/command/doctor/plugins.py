"""What is wrong with the installed plugins of each kind, and what fixes it."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from verl_engine.command.doctor.findings import Finding
from verl_engine.contract.errors import PluginError
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.catalog import PluginEntry, list_plugins
from verl_engine.host.distributions import Distribution, normalize_name
from verl_engine.host.kinds import all_kinds


def list_all(backend: str | None) -> list[PluginEntry]:
    """Look at the metadata of every plugin, or of one backend; none is imported."""
    if backend is not None:
        return [entry for entry in list_plugins(BACKEND) if entry.name == backend]
    return [entry for kind in all_kinds() for entry in list_plugins(kind)]


def plugin_findings(
    entries: Iterable[PluginEntry], installed: Mapping[str, Distribution], backend: str | None
) -> list[Finding]:
    """Say what is wrong with each plugin of `list_all`; the backend that is asked about must be complete."""
    findings = []
    for entry in entries:
        if entry.problem:
            is_odd = entry.is_incomplete and backend is None
            severity: Literal["error", "warning"] = "warning" if is_odd else "error"
            text, fix = entry.problem, entry.fix
            if entry.is_incomplete:
                text, fix = f"{text}, which is on no package index", how_to_get(entry)
            elif text.startswith("missing "):
                text = "; ".join(_explain_missing(entry, installed))
            findings.append(Finding(severity, subject(entry), text, fix, concerns_all=False))
    return findings


def subject(entry: PluginEntry) -> str:
    """Name a plugin as findings do."""
    return f"{entry.kind.name} {entry.name}"


def inspect_backend(name: str, devices: Mapping[str, list[str]]) -> list[Finding]:
    """Load one backend's hooks module, as a job would, and see whether it fits this machine."""
    about = f"backend {name}"
    heavy = {"torch", "transformers"} - sys.modules.keys()
    try:
        spec = BackendHost.load(name).spec
    except PluginError as error:
        return [Finding("error", about, str(error), concerns_all=False)]
    findings = []
    imported = sorted(heavy & sys.modules.keys())
    if imported:
        text = (
            f"its hooks module imports {' and '.join(imported)}; that belongs into its hooks, so that listing is quick"
        )
        findings.append(Finding("warning", about, text, concerns_all=False))
    if not set(spec.devices) & devices.keys():
        text = f"it runs on {', '.join(spec.devices)}; this machine has {', '.join(devices)}"
        findings.append(Finding("error", about, text, concerns_all=False))
    return findings


def how_to_get(entry: PluginEntry) -> str | None:
    """Return a line that installs a backend's missing modules, as its hooks module tells."""
    try:
        needs = BackendHost.load(entry.name).spec.needs
    except PluginError:
        return None  # why it cannot be loaded is told to who asks about it
    return " && ".join(need.install for need in needs if need.module in entry.missing_modules) or None


def _explain_missing(entry: PluginEntry, installed: Mapping[str, Distribution]) -> Iterator[str]:
    for requirement in entry.missing:
        name = requirement.partition("[")[0]
        for sign in "<>=!~@ ;":
            name = name.partition(sign)[0]
        found = installed.get(normalize_name(name))
        have = f"{found.version} is installed" if found else "it is not installed"
        yield f"{entry.origin} needs {requirement}, but {have}"
