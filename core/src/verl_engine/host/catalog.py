"""List plugins by their metadata: nothing of theirs is imported."""

from collections import Counter
from importlib.util import find_spec
from typing import NamedTuple

from verl_engine.contract.kinds import BACKEND, KindSpec
from verl_engine.contract.names import DEVICE_KEYWORD, MODULE_KEYWORD
from verl_engine.host.distributions import Distribution, installed_distributions
from verl_engine.host.install_hints import pip_install
from verl_engine.host.requirements import missing_requirements


class PluginEntry(NamedTuple):
    """One entry point of one installed distribution."""

    kind: KindSpec
    name: str
    """The name in the config."""
    value: str
    """What it points to: ``module`` or ``module:attribute``."""
    distribution: str
    version: str
    summary: str
    """One line about the distribution."""
    api_version: int | None
    """Version of its kind's interface that it was written for; None where its metadata does not say."""
    devices: tuple[str, ...]
    """Device kinds it runs on, as its metadata says."""
    missing: tuple[str, ...]
    """Requirements that are not installed, as pip takes them."""
    missing_modules: tuple[str, ...] = ()
    """Modules that cannot be found, and are on no package index."""
    rivals: tuple[str, ...] = ()
    """Other distributions that offer the same name."""

    @property
    def module(self) -> str:
        """The module that `value` names."""
        return self.value.partition(":")[0].strip()

    @property
    def origin(self) -> str:
        """The distribution with its version."""
        return f"{self.distribution} {self.version}"

    @property
    def label(self) -> str:
        """Names it with its origin, for messages."""
        return f"{self.kind.title} {self.name!r} of {self.origin}"

    @property
    def fits_api(self) -> bool:
        """Whether it can be loaded here, as far as the metadata says."""
        return self.api_version in {None, self.kind.api_version}

    def as_json(self) -> dict[str, object]:
        """Return what ``--json`` of the commands prints of it."""
        return {
            "kind": self.kind.name,
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "plugin_api_version": self.api_version,
            "devices": list(self.devices),
            "status": self.problem or "ready",
            "missing_requirements": list(self.missing),
            "missing_modules": list(self.missing_modules),
            "fix": self.fix,
        }

    @property
    def is_incomplete(self) -> bool:
        """Whether it lacks only what pip does not install with it."""
        return bool(self.missing_modules) and not self._replace(missing_modules=()).problem

    @property
    def problem(self) -> str:
        """Why it cannot be used, as far as the metadata says; empty where it can."""
        if self.name in self.kind.reserved:
            return f"name taken by {self.kind.owner} itself, which never loads this one"
        if self.rivals:
            return f"name also offered by {' and '.join(self.rivals)}"
        if not self.fits_api:
            return f"needs plugin API {self.api_version}, {self.kind.owner} has {self.kind.api_version}"
        if self.missing:
            return f"missing {', '.join(self.missing)}"
        return f"missing module {', '.join(self.missing_modules)}" if self.missing_modules else ""

    @property
    def fix(self) -> str | None:
        """The command that makes it usable, where it is not."""
        if self.name in self.kind.reserved:
            return f"python -m pip uninstall {self.distribution}"
        if self.rivals:
            return f"python -m pip uninstall {self.distribution}  # to keep {' and '.join(self.rivals)}"
        if not self.fits_api:
            is_old = (self.api_version or 0) < self.kind.api_version
            return pip_install("--upgrade", self.distribution if is_old else self.kind.owner)
        if self.missing:
            return pip_install(*self.missing)
        # How to get them its hooks module knows, which a listing does not import.
        return f"verl-engine doctor --backend {self.name}" if self.missing_modules and self.kind == BACKEND else None


def list_plugins(kind: KindSpec) -> list[PluginEntry]:
    """List what is installed of a kind, by name; every entry, also when two distributions use one name."""
    installed = installed_distributions()
    entries: list[PluginEntry] = []
    for distribution in installed.values():
        points = distribution.read_entry_points(kind.group)
        if points:
            entries += _entries(kind, points, distribution, installed)
    entries.sort(key=lambda entry: (entry.name, entry.distribution))
    counts = Counter(entry.name for entry in entries)
    return [entry if counts[entry.name] == 1 else entry._replace(rivals=_rivals(entry, entries)) for entry in entries]


def origin_of(kind: KindSpec, name: str) -> str:
    """Name the distribution that offers a plugin, with its version; "" where none does."""
    return next((entry.origin for entry in list_plugins(kind) if entry.name == name), "")


def _rivals(entry: PluginEntry, entries: list[PluginEntry]) -> tuple[str, ...]:
    return tuple(other.distribution for other in entries if other.name == entry.name and other is not entry)


def _entries(
    kind: KindSpec, points: list[tuple[str, str]], distribution: Distribution, installed: dict[str, Distribution]
) -> list[PluginEntry]:
    headers = distribution.read_headers()
    single = dict(headers)
    keywords = single.get("keywords", "").replace(",", " ").split()

    def behind(prefix: str) -> list[str]:
        return [keyword.removeprefix(prefix) for keyword in keywords if keyword.startswith(prefix)]

    requirements = [text for field, text in headers if field == "requires-dist"]
    return [
        PluginEntry(
            kind=kind,
            name=name,
            value=value,
            distribution=single.get("name", distribution.name),
            version=distribution.version,
            summary=single.get("summary", ""),
            api_version=next((int(version) for version in behind(kind.api_keyword) if version.isdecimal()), None),
            devices=tuple(behind(DEVICE_KEYWORD)),
            missing=missing_requirements(requirements, installed),
            missing_modules=tuple(module for module in behind(MODULE_KEYWORD) if find_spec(module) is None),
        )
        for name, value in points
    ]
