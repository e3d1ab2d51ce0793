"""All that the doctor finds, as plain data."""

import os
from dataclasses import asdict, dataclass
from typing import Any

from verl_engine.command.doctor.conflicts import find_conflicts, unreadable_metadata
from verl_engine.command.doctor.environment import Situation, Variable, read_environment
from verl_engine.command.doctor.findings import Finding
from verl_engine.command.doctor.machine import describe_machine, find_devices, machine_findings, package_versions
from verl_engine.command.doctor.patch_report import PatchReport, describe_patches
from verl_engine.command.doctor.plugins import inspect_backend, list_all, plugin_findings
from verl_engine.contract.kinds import BACKEND
from verl_engine.host.catalog import PluginEntry
from verl_engine.host.distributions import installed_distributions


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found on this machine."""

    backend: str | None
    """The one that was asked about."""
    machine: dict[str, Any]
    packages: dict[str, str]
    devices: dict[str, list[str]]
    plugins: list[PluginEntry]
    environment: list[Variable]
    patches: list[PatchReport] | None
    """None where nobody asked."""
    findings: list[Finding]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing keeps the backend that was asked about from working; without one, what pip installed."""
        return not any(finding.breaks(self.backend) for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {
            "ok": self.is_healthy,
            "backend": self.backend,
            "machine": self.machine,
            "packages": self.packages,
            "devices": self.devices,
            "plugins": [entry.as_json() for entry in self.plugins],
            "environment": [variable._asdict() for variable in self.environment],
            "patches": None if self.patches is None else [asdict(report) for report in self.patches],
            "findings": [asdict(finding) for finding in self.findings],
        }


def examine(backend: str | None, num_ranks: int, timeout_s: float, *, with_patches: bool) -> Examination:
    """Look at everything, and at one backend more closely: its hooks module is imported, as a job would.

    With `with_patches` a process is prepared for the backend, or for each that can be used.
    """
    installed = installed_distributions()
    machine = describe_machine()
    devices, torch_error = find_devices(installed, timeout_s)
    plugins = list_all(backend)
    environment = read_environment(Situation(os.environ, machine["cores"], num_ranks, frozenset(installed)))
    findings = [
        *machine_findings(machine, torch_error),
        *unreadable_metadata(),
        *find_conflicts(installed, devices),
        *plugin_findings(plugins, installed, backend),
        *(Finding("warning", variable.name, variable.hint) for variable in environment if variable.hint),
    ]
    if backend is not None and not any(finding.subject == f"backend {backend}" for finding in findings):
        findings += inspect_backend(backend, devices)
    patches = None
    if with_patches:
        usable = [entry.name for entry in plugins if entry.kind == BACKEND and not entry.problem]
        asked = usable if backend is None else [backend]
        patches = [describe_patches(name, timeout_s=timeout_s) for name in asked if name in usable]
        failed = [report for report in patches if report.error]
        findings += [Finding("error", f"backend {each.backend}", each.error, concerns_all=False) for each in failed]
    packages = package_versions(installed)
    return Examination(backend, machine, packages, devices, plugins, environment, patches, findings)
