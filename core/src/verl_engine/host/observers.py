"""Observers: plugins that wrap an engine's hooks to observe it, for example to take times. None changes a result."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pluggy

from verl_engine.contract.errors import HookError
from verl_engine.contract.kinds import OBSERVER
from verl_engine.host.loading import find_plugin, load_entry
from verl_engine.host.rollback import forgetting_on_failure


class Observer(NamedTuple):
    """One observer that a host has registered."""

    name: str
    label: str
    """Names it with its distribution and version in messages."""
    plugin: object


def check_observers(names: Sequence[str], at: str) -> None:
    """Check that observers are installed, without importing them; a PluginError names the field `at`."""
    for index, name in enumerate(names):
        find_plugin(OBSERVER, name, f"{at}[{index}]")


def load_observer(name: str, at: str) -> Observer:
    """Load one by name; a class is called without arguments, so each host has an observer of its own.

    A PluginError where it is not there or cannot be imported, or its class cannot be called so.
    """
    entry = find_plugin(OBSERVER, name, at)
    label = entry.label
    with forgetting_on_failure(entry.module):
        plugin = load_entry(entry).plugin
        if isinstance(plugin, type):
            try:
                plugin = plugin()
            except Exception as cause:  # a plugin's constructor can raise anything
                raise HookError(f"{label}: {entry.value}() failed: {type(cause).__name__}: {cause}") from cause
    return Observer(name, label, plugin)


def check_only_wraps(relays: Mapping[str, pluggy.HookCaller], observer: Observer) -> None:
    """Refuse an observer, registered already, that implements hooks in the backend's place, or has none at all."""
    own = [
        (name, implementation)
        for name, relay in relays.items()
        for implementation in relay.get_hookimpls()
        if implementation.plugin is observer.plugin
    ]
    if not own:
        raise HookError(f"{observer.label} wraps no hook; mark its functions with @hookimpl(wrapper=True)")
    implemented = [name for name, implementation in own if not (implementation.wrapper or implementation.hookwrapper)]
    if implemented:
        raise HookError(
            f"{observer.label} would implement {', '.join(implemented)} in the backend's place; an observer only wraps "
            "hooks: @hookimpl(wrapper=True)"
        )


def collect_metrics(observers: Sequence[Observer]) -> dict[str, float]:
    """Ask each observer with a method ``metrics`` for its metrics since the last time, under ``observer/metric``.

    A HookError where that fails, or what one returns is no mapping of names to numbers.
    """
    found: dict[str, float] = {}
    for observer in observers:
        metrics: Callable[[], Mapping[str, float]] | None = getattr(observer.plugin, "metrics", None)
        if metrics is None:
            continue
        try:
            found |= {f"{observer.name}/{name}": float(value) for name, value in metrics().items()}
        except Exception as cause:  # a plugin's method can raise anything
            raise HookError(
                f"{observer.label}: metrics() must return a dict of names to numbers: {type(cause).__name__}: {cause}"
            ) from cause
    return found
