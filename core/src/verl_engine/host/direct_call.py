"""The shortest way to a hook with one implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pluggy


def positional_call(relay: pluggy.HookCaller, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Make a function that calls a ``firstresult`` hook by position.

    A relay takes a microsecond a call, a function a twentieth of that. So where a single implementation takes all
    arguments in their order, it is called itself; with wrappers, or in any other case, the relay is.

    Args:
        relay: with all its implementations registered; later ones would go unheard.
        arguments: names of the hookspec's arguments.
    """
    implementations = relay.get_hookimpls()
    if len(implementations) == 1:
        only = implementations[0]
        if not (only.wrapper or only.hookwrapper) and tuple(only.argnames) == arguments and not only.kwargnames:
            function: Callable[..., Any] = only.function
            return function
    return lambda *values: relay(**dict(zip(arguments, values, strict=True)))
