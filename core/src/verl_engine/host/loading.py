"""Load one plugin by name. Each way in which that can fail is an error of its own."""

from __future__ import annotations

import difflib
import importlib

from verl_engine.contract.errors import (
    DuplicatePluginError,
    PluginApiVersionError,
    PluginImportError,
    UnknownPluginError,
)
from verl_engine.contract.names import PLUGIN_API_VERSION
from verl_engine.host.catalog import PluginEntry, list_plugins, pip_install
from verl_engine.host.distributions import installed_distributions
from verl_engine.host.known_plugins import KNOWN_PLUGINS, kind_of
from verl_engine.host.rollback import forgetting_on_failure


def load_plugin(group: str, name: str, at: str = "") -> object:
    """Import what an entry point names; no other plugin is imported.

    Args:
        group: such as ``verl_engine.backends``.
        name: the entry point's name.
        at: dotted path of the config field that chose it, such as ``engine.backend``; for messages.
    Returns:
        The module or object.
    Raises:
        UnknownPluginError: nothing installed has the name.
        DuplicatePluginError: two distributions have it.
        PluginApiVersionError: it was written for another plugin API; nothing of it was imported.
        PluginImportError: importing it failed; the cause is chained.
    """
    return load_entry(find_plugin(group, name, at))


def find_plugin(group: str, name: str, at: str = "") -> PluginEntry:
    """Find a plugin's entry without importing it.

    Raises:
        UnknownPluginError: nothing installed has the name.
        DuplicatePluginError: two distributions have it.
    """
    entries = list_plugins(group)
    matches = [entry for entry in entries if entry.name == name]
    if not matches:
        raise UnknownPluginError(_explain_unknown(group, name, at, sorted({entry.name for entry in entries})))
    if len(matches) > 1:
        owners = " and ".join(f"{entry.distribution} {entry.version} ({entry.value})" for entry in matches)
        raise DuplicatePluginError(
            f"{kind_of(group)} {name!r} is offered by {owners}; uninstall one of them: "
            f"python -m pip uninstall {matches[-1].distribution}"
        )
    return matches[0]


def describe(entry: PluginEntry) -> str:
    """Name a plugin with its origin, for messages."""
    return f"{kind_of(entry.group)} {entry.name!r} of {entry.distribution} {entry.version}"


def check_api_version(subject: str, version: int, distribution: str = "") -> None:
    """Refuse a plugin that was written for another plugin API.

    Raises:
        PluginApiVersionError: the version is not this core's.
    """
    if version == PLUGIN_API_VERSION:
        return
    upgrade = distribution if version < PLUGIN_API_VERSION else "verl-engine-core"
    advice = f"; upgrade the older of the two: {pip_install('--upgrade', upgrade)}" if upgrade else ""
    raise PluginApiVersionError(
        f"{subject} was written for plugin API {version}, but this verl-engine-core has plugin API "
        f"{PLUGIN_API_VERSION}{advice}"
    )


def load_entry(entry: PluginEntry) -> object:
    """Import what an entry points to, unless its metadata says that it does not fit this core.

    Raises:
        PluginApiVersionError: it was written for another plugin API; nothing of it was imported.
        PluginImportError: importing it failed; the cause is chained, and the plugin's own modules are forgotten.
    """
    if entry.api_version is not None:
        check_api_version(describe(entry), entry.api_version, entry.distribution)
    attributes = entry.value.partition(":")[2].strip()
    try:
        with forgetting_on_failure(entry.module):
            found: object = importlib.import_module(entry.module)
            for attribute in filter(None, attributes.split(".")):
                found = getattr(found, attribute)
    # A stranger's module can raise anything; SystemExit too, from a script that was meant to be run.
    except (Exception, SystemExit) as cause:
        advice = f"; install what it needs: {pip_install(*entry.missing)}" if entry.missing else ""
        raise PluginImportError(
            f"{describe(entry)} is installed, but importing {entry.value} failed: "
            f"{type(cause).__name__}: {cause}{advice}"
        ) from cause
    return found


def _explain_unknown(group: str, name: str, at: str, installed: list[str]) -> str:
    kind = kind_of(group)
    subject = f"{at}={name!r}" if at else f"{kind} {name!r}"
    owner = KNOWN_PLUGINS.get((group, name))
    if owner is not None:
        found = installed_distributions().get(owner)
        if found is None:
            return f"{subject} is not installed; install it with: {pip_install(owner)}"
        return f"{subject} is not in {owner} {found.version}; upgrade it with: {pip_install('--upgrade', owner)}"
    listing = f"installed: {', '.join(installed)}" if installed else f"no {kind} is installed"
    return f"{subject} is not a known {kind}{_suggest(group, name, installed)}; {listing}"


def _suggest(group: str, name: str, installed: list[str]) -> str:
    known = {known for known_group, known in KNOWN_PLUGINS if known_group == group}
    close = difflib.get_close_matches(name.lower(), sorted(known.union(installed)), n=3, cutoff=0.5)
    if not close:
        return ""
    labels = [
        label if label in installed else f"{label} (not installed: {pip_install(KNOWN_PLUGINS[group, label])})"
        for label in close
    ]
    return f"; did you mean {' or '.join(labels)}?"
