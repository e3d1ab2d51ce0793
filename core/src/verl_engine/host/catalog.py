"""List plugins by their metadata: nothing of theirs is imported."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from verl_engine.contract.names import API_KEYWORD, DEVICE_KEYWORD, MODULE_KEYWORD, PLUGIN_API_VERSION
from verl_engine.host.distributions import Distribution, installed_distributions
from verl_engine.host.requirements import missing_requirements


class PluginEntry(NamedTuple):
    """One entry point of one installed distribution."""

    group: str
    name: str
    """The name in the config."""
    value: str
    """What it points to: ``module`` or ``module:attribute``."""
    distribution: str
    version: str
    summary: str
    """One line about the distribution."""
    api_version: int | None
    """Plugin-API version it was written for; None where its metadata does not say."""
    devices: tuple[str, ...]
    """Device kinds it runs on, as its metadata says."""
    missing: tuple[str, ...]
    """Requirements that are not installed, as pip takes them."""
    missing_modules: tuple[str, ...] = ()
    """Modules that cannot be found, and are on no package index."""

    @property
    def module(self) -> str:
        """The module that `value` names."""
        return self.value.partition(":")[0].strip()

    @property
    def fits_api(self) -> bool:
        """Whether this core can run it, as far as the metadata says."""
        return self.api_version in {None, PLUGIN_API_VERSION}

    @property
    def mend(self) -> str | None:
        """The command that makes it usable, where there is something to mend."""
        if not self.fits_api:
            is_old = (self.api_version or 0) < PLUGIN_API_VERSION
            return pip_install("--upgrade", self.distribution if is_old else "verl-engine-core")
        if self.missing:
            return pip_install(*self.missing)
        # How to get them its hooks module knows, which a listing does not import.
        return f"verl-engine doctor --backend {self.name}" if self.missing_modules else None


def list_plugins(group: str) -> list[PluginEntry]:
    """List what is installed under an entry-point group, by name.

    Args:
        group: such as ``verl_engine.backends``.
    Returns:
        Every entry, also when two distributions use one name.
    """
    installed = installed_distributions()
    entries: list[PluginEntry] = []
    for distribution in installed.values():
        points = distribution.read_entry_points(group)
        if points:
            entries += _entries(group, points, distribution, installed)
    return sorted(entries, key=lambda entry: (entry.name, entry.distribution))


def pip_install(*what: str) -> str:
    """Write the command that installs something with the Python that is running."""
    quoted = [f'"{item}"' if any(character in item for character in "<>=!~ ;@[") else item for item in what]
    return " ".join(["python", "-m", "pip", "install", *quoted])


def _entries(
    group: str, points: list[tuple[str, str]], distribution: Distribution, installed: dict[str, Distribution]
) -> list[PluginEntry]:
    headers = distribution.read_headers()
    single = dict(headers)
    keywords = single.get("keywords", "").replace(",", " ").split()
    versions = [keyword.removeprefix(API_KEYWORD) for keyword in keywords if keyword.startswith(API_KEYWORD)]
    devices = [keyword.removeprefix(DEVICE_KEYWORD) for keyword in keywords if keyword.startswith(DEVICE_KEYWORD)]
    requirements = [text for field, text in headers if field == "requires-dist"]
    modules = [keyword.removeprefix(MODULE_KEYWORD) for keyword in keywords if keyword.startswith(MODULE_KEYWORD)]
    return [
        PluginEntry(
            group=group,
            name=name,
            value=value,
            distribution=single.get("name", distribution.name),
            version=distribution.version,
            summary=single.get("summary", ""),
            api_version=next((int(version) for version in versions if version.isdecimal()), None),
            devices=tuple(devices),
            missing=missing_requirements(requirements, installed),
            missing_modules=tuple(module for module in modules if find_spec(module) is None),
        )
        for name, value in points
    ]
