"""Load one plugin of any kind by name. Each way in which that can fail is an error of its own."""

import difflib
import importlib
from typing import Any, NamedTuple

from verl_engine.contract.errors import DuplicatePluginError, PluginImportError, UnknownPluginError
from verl_engine.contract.kinds import KindSpec
from verl_engine.host.catalog import PluginEntry, list_plugins
from verl_engine.host.distributions import installed_distributions
from verl_engine.host.install_hints import missing_line, pip_install
from verl_engine.host.rollback import forgetting_on_failure
from verl_engine.host.spec_check import check_api_version, checked_spec


class LoadedPlugin(NamedTuple):
    """A plugin that was imported and fits its kind."""

    entry: PluginEntry
    plugin: object
    """The module or object that its entry point names."""
    spec: Any
    """Its SPEC, checked; None where plugins of its kind have none."""


def load_plugin(kind: KindSpec, name: str, at: str = "") -> LoadedPlugin:
    """Find and load a plugin that the config field `at` names; see `find_plugin` and `load_entry`."""
    return load_entry(find_plugin(kind, name, at))


def load_entry(entry: PluginEntry) -> LoadedPlugin:
    """Import what an entry point names, and check its SPEC; no other plugin is imported.

    Raises:
        PluginApiVersionError: it was written for another plugin API; nothing is imported where its metadata says so.
        PluginImportError: importing it failed; the cause is chained.
        HookError: it is not what its kind asks for. Then, and where importing fails, its modules are forgotten.
    """
    kind = entry.kind
    if entry.api_version is not None:
        check_api_version(kind, entry.label, entry.api_version, entry.distribution)
    with forgetting_on_failure(entry.module):
        plugin = _import(entry)
        spec = checked_spec(kind, plugin, entry.name, entry.label, entry.distribution) if kind.spec_class else None
    return LoadedPlugin(entry, plugin, spec)


def find_plugin(kind: KindSpec, name: str, at: str = "") -> PluginEntry:
    """Find a plugin's entry without importing it; an UnknownPluginError or DuplicatePluginError unless there is one."""
    entries = list_plugins(kind)
    matches = [entry for entry in entries if entry.name == name and name not in kind.reserved]
    if not matches:
        raise UnknownPluginError(_explain_unknown(kind, name, at, sorted({entry.name for entry in entries})))
    if len(matches) > 1:
        owners = " and ".join(f"{entry.origin} ({entry.value})" for entry in matches)
        fixes = "".join(f"\n  {entry.fix}" for entry in matches)
        raise DuplicatePluginError(f"{kind.title} {name!r} is offered by {owners}; uninstall one of them:{fixes}")
    return matches[0]


def _import(entry: PluginEntry) -> object:
    attributes = entry.value.partition(":")[2].strip()
    try:
        found: object = importlib.import_module(entry.module)
        for attribute in filter(None, attributes.split(".")):
            found = getattr(found, attribute)
    # A plugin's module can raise anything; SystemExit too, from a script that was meant to be run.
    except (Exception, SystemExit) as cause:
        raise PluginImportError(
            f"{entry.label} is installed, but importing {entry.value} failed: "
            f"{type(cause).__name__}: {cause}{missing_line(entry.missing)}"
        ) from cause
    return found


def _explain_unknown(kind: KindSpec, name: str, at: str, installed: list[str]) -> str:
    subject = f"{at}={name!r}" if at else f"{kind.title} {name!r}"
    owner = kind.known.get(name)
    if owner is not None:
        found = installed_distributions().get(owner)
        if found is None:
            return f"{subject} is not installed; install it with: {pip_install(owner)}"
        return f"{subject} is not in {owner} {found.version}; upgrade it with: {pip_install('--upgrade', owner)}"
    names = sorted({*kind.reserved, *installed})
    listing = f"installed: {', '.join(names)}" if names else f"no {kind.title} is installed"
    return f"{subject} is not a known {kind.title}{_suggest(kind, name, installed)}; {listing}"


def _suggest(kind: KindSpec, name: str, installed: list[str]) -> str:
    names = sorted({*kind.known, *kind.reserved, *installed})
    close = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    is_absent = {*kind.known}.difference(installed)
    labels = [
        f"{label} (not installed: {pip_install(kind.known[label])})" if label in is_absent else label for label in close
    ]
    return f"; did you mean {' or '.join(labels)}?" if labels else ""
