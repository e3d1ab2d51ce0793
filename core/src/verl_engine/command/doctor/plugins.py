"""Installed plugins of each group, whether they can be used, and what mends them."""

from __future__ import annotations

import sys
from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

from verl_engine.command.doctor.findings import Finding
from verl_engine.contract.errors import PluginError
from verl_engine.contract.names import BACKENDS_GROUP, PLUGIN_API_VERSION
from verl_engine.host.backend_host import BackendHost
from verl_engine.host.catalog import list_plugins, pip_install
from verl_engine.host.distributions import normalize_name
from verl_engine.host.known_plugins import KINDS, KNOWN_PLUGINS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from verl_engine.host.catalog import PluginEntry
    from verl_engine.host.distributions import Distribution


class PluginStatus(NamedTuple):
    """One plugin."""

    entry: PluginEntry
    problem: str
    """Why it cannot be used; empty where it can."""
    mend: str | None
    is_incomplete: bool = False
    """Whether it lacks only what pip does not install with it: no fault of what is installed, until it is asked for."""


def list_all(installed: Mapping[str, Distribution]) -> dict[str, list[PluginStatus]]:
    """Look at every plugin's metadata; none is imported, but for those that alone know how to get what they lack.

    Returns:
        By what a plugin of the group is called: ``backend``, ``command`` and so on.
    """
    found = {}
    for group, kind in KINDS.items():
        entries = list_plugins(group)
        counts = Counter(entry.name for entry in entries)
        found[kind] = [PluginStatus(entry, *_status(entry, counts[entry.name], installed)) for entry in entries]
    return found


def plugin_findings(plugins: Mapping[str, list[PluginStatus]], backend: str | None) -> list[Finding]:
    """Return what is wrong with each plugin.

    Args:
        plugins: as `list_all` found them.
        backend: the one that is asked about, which must be complete.
    """
    findings = []
    for kind, statuses in plugins.items():
        for status in statuses:
            if status.problem:
                is_odd = status.is_incomplete and not (kind == KINDS[BACKENDS_GROUP] and status.entry.name == backend)
                subject = f"{kind} {status.entry.name}"
                severity: Literal["error", "warning"] = "warning" if is_odd else "error"
                findings.append(Finding(severity, subject, status.problem, status.mend, concerns_all=False))
    return findings


def inspect_backend(name: str, devices: Mapping[str, list[str]]) -> list[Finding]:
    """Load one backend's hooks module, as a job would, and see whether it fits this machine."""
    subject = f"backend {name}"
    heavy = {"torch", "transformers"} - sys.modules.keys()
    try:
        spec = BackendHost.load(name).spec
    except PluginError as error:
        return [Finding("error", subject, str(error), _install(name), concerns_all=False)]
    findings = []
    imported = sorted(heavy & sys.modules.keys())
    if imported:
        text = (
            f"its hooks module imports {' and '.join(imported)}; that belongs into its hooks, so that listing is quick"
        )
        findings.append(Finding("warning", subject, text, concerns_all=False))
    if not set(spec.devices) & devices.keys():
        text = f"it runs on {', '.join(spec.devices)}; this machine has {', '.join(devices)}"
        findings.append(Finding("error", subject, text, concerns_all=False))
    return findings


def _status(
    entry: PluginEntry, num_same_name: int, installed: Mapping[str, Distribution]
) -> tuple[str, str | None, bool]:
    if num_same_name > 1:
        text = f"another distribution than {entry.distribution} offers this name too; keep one of them"
        return text, f"python -m pip uninstall {entry.distribution}", False
    if not entry.fits_api:
        return f"it needs plugin API {entry.api_version}, this core has {PLUGIN_API_VERSION}", entry.mend, False
    if entry.missing:
        return "; ".join(_explain_missing(entry, installed)), entry.mend, False
    if entry.missing_modules:
        names = ", ".join(entry.missing_modules)
        return (
            f"it needs the module {names}, which cannot be found and is on no package index",
            how_to_get(entry),
            True,
        )
    return "", None, False


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
        yield f"{entry.distribution} {entry.version} needs {requirement}, but {have}"


def _install(name: str) -> str | None:
    """The command that installs a known backend which is not there."""
    owner = KNOWN_PLUGINS.get((BACKENDS_GROUP, name))
    is_there = any(entry.name == name for entry in list_plugins(BACKENDS_GROUP))
    return pip_install(owner) if owner and not is_there else None
