"""How a host calls hooks: by the shortest way, and knowing who took a result away."""

from collections.abc import Callable, Generator
from typing import Any

import pluggy

from verl_engine.contract.markers import hookimpl


def positional_call(relay: pluggy.HookCaller, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Make a function that calls a ``firstresult`` hook by position, with the arguments of its hookspec.

    A single implementation that takes all of them in their order is called itself, in a twentieth of the time.
    """
    implementations = relay.get_hookimpls()
    if len(implementations) == 1:
        only = implementations[0]
        if not (only.wrapper or only.hookwrapper) and tuple(only.argnames) == arguments and not only.kwargnames:
            function: Callable[..., Any] = only.function
            return function
    return lambda *values: relay(**dict(zip(arguments, values, strict=True)))


class ResultWatch:
    """Wraps each hook that has a result, inside the observer that is registered next, and sees what that one gets."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        self.is_there: dict[str, bool] = {}
        """Of each hook's last call: whether a result came as far as here."""
        for name, relay in vars(manager.hook).items():
            if getattr(getattr(relay, "spec", None), "opts", {}).get("firstresult"):
                setattr(self, name, self._watching(name))
        manager.register(self)

    def _watching(self, name: str) -> Callable[[], Generator[None, object, object]]:
        @hookimpl(wrapper=True)
        def watch() -> Generator[None, object, object]:
            self.is_there[name] = False  # and stays so if it raises
            result = yield
            self.is_there[name] = result is not None and result is not False
            return result

        return watch
