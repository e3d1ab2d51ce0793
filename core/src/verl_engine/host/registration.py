"""Register plugins with pluggy, wholly or not at all, and explain what does not fit."""

import difflib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pluggy

from verl_engine.contract import hookspecs
from verl_engine.contract.backend import BackendSpec
from verl_engine.contract.errors import HookError
from verl_engine.contract.names import PROJECT_NAME
from verl_engine.host.default_hooks import DEFAULT_HOOKS
from verl_engine.host.observers import Observer, check_only_wraps


def new_manager() -> pluggy.PluginManager:
    """Make a manager that knows the hooks and no plugin."""
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    return manager


def register_backend(manager: pluggy.PluginManager, backend: object, spec: BackendSpec, label: str) -> frozenset[str]:
    """Register a backend, and the core's default for each hook that has one and that the backend does not implement.

    Returns the hooks that have their default.
    Raises:
        HookError: a hook does not exist or fit, ``engine_create`` is missing, or a hook has two implementations. The
            manager is as it was.
    """
    with _registered(manager, backend, spec.name, label):
        hooks = dict(_relays(manager))
        unmarked = [
            name for name in hooks if not hooks[name].get_hookimpls() and getattr(backend, name, None) is not None
        ]
        if unmarked:
            raise HookError(f"{label}: {', '.join(unmarked)} lacks the @hookimpl decorator, and would not be called")
        own = {
            name: [each for each in relay.get_hookimpls() if not (each.wrapper or each.hookwrapper)]
            for name, relay in hooks.items()
        }
        for name, implementations in own.items():
            _check_implementations(name, implementations, label)
        if not own["engine_create"]:
            raise HookError(f"{label} lacks the required hook engine_create")
        defaults = {name: hook for name, hook in DEFAULT_HOOKS.items() if not own[name]}
        manager.register(SimpleNamespace(**defaults), "verl-engine-core")
    return frozenset(defaults)


def _check_implementations(name: str, implementations: list[pluggy.HookImpl], label: str) -> None:
    if len(implementations) > 1:
        raise HookError(f"{label} implements {name} twice; where the first returned None the second would run too")
    arguments = inspect.signature(getattr(hookspecs, name)).parameters
    for each in implementations:
        known = [argument for argument in each.kwargnames if argument in arguments]
        if known:  # pluggy passes only what has no default, so the value given would be lost
            raise HookError(f"{label}: {name} gives {', '.join(known)} a default; the core passes every argument")


def register_observer(manager: pluggy.PluginManager, observer: Observer) -> None:
    """Register an observer around what is there, or raise a HookError and leave the manager as it was."""
    with _registered(manager, observer.plugin, f"observer {observer.name}", observer.label):
        check_only_wraps({name: relay for name, relay in _relays(manager) if relay.has_spec()}, observer)


@contextmanager
def _registered(manager: pluggy.PluginManager, plugin: object, name: str, label: str) -> Iterator[None]:
    """Register a plugin, and take it back if it or the checks inside fail."""
    known = [relay for relay, _ in _relays(manager)]
    try:
        _register(manager, plugin, name, label)
        yield
    except BaseException:
        if manager.has_plugin(name):
            manager.unregister(name=name)
        for relay, _ in _relays(manager):
            if relay not in known:  # a hook that does not exist leaves a relay behind
                delattr(manager.hook, relay)
        raise


def _register(manager: pluggy.PluginManager, plugin: object, name: str, label: str) -> None:
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        raise HookError(f"{label}: a hook does not fit its hookspec: {error}") from error
    except ValueError as error:
        raise HookError(f"{label} is registered twice: {error}") from error
    implementations = [implementation for _, relay in _relays(manager) for implementation in relay.get_hookimpls()]
    if asynchronous := [each for each in implementations if inspect.iscoroutinefunction(each.function)]:
        names = ", ".join(each.function.__name__ for each in asynchronous)
        raise HookError(f"{label}: {names} is `async def`, and hooks are called without await; write `def`")
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise HookError(_explain_unknown_hook(manager, label)) from error


def _relays(manager: pluggy.PluginManager) -> list[tuple[str, pluggy.HookCaller]]:
    return [(name, relay) for name, relay in vars(manager.hook).items() if isinstance(relay, pluggy.HookCaller)]


def _explain_unknown_hook(manager: pluggy.PluginManager, label: str) -> str:
    known = [name for name in vars(hookspecs) if name.startswith("engine_")]
    texts = []
    for name, relay in _relays(manager):
        if not relay.has_spec():
            close = difflib.get_close_matches(name, known, n=1)
            texts.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return f"{label} implements hooks that do not exist: {', '.join(texts)}; hooks are: {', '.join(known)}"
