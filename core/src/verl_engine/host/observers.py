"""Observers: plugins that wrap an engine's hooks to observe it, for example to take times. None changes a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from verl_engine.contract.errors import HookError
from verl_engine.contract.kinds import OBSERVER
from verl_engine.host.loading import find_plugin, load_entry
from verl_engine.host.rollback import forgetting_on_failure

if TYPE_CHECKING:
    import pluggy


class Observer(NamedTuple):
    """One observer that a host has registered."""

    name: str
    label: str
    """Names it with its distribution and version in messages."""
    plugin: object


def check_observers(names: Sequence[str], at: str) -> None:
    """Check that observers are installed, without importing them.

    Args:
        names: entry points' names in the group ``verl_engine.observers``.
        at: dotted path of the config field that names them.
    Raises:
        PluginError: one is not there, or two distributions offer it.
    """
    for index, name in enumerate(names):
        find_plugin(OBSERVER, name, f"{at}[{index}]")


def load_observer(name: str, at: str) -> Observer:
    """Load one by name; a class is called without arguments, so each host has an observer of its own.

    Raises:
        PluginError: it is not there or cannot be imported.
        HookError: its class cannot be called without arguments.
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
    """Check that an observer, registered already, wraps hooks and implements none in the backend's place.

    Raises:
        HookError: it implements one, or has no hooks at all.
    """
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
    """Ask each observer that has a method ``metrics`` for its metrics since the last time.

    Returns:
        The metrics, each under ``observer's name/its name``.
    Raises:
        HookError: what one returns is no mapping of names to numbers, or it fails.
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
