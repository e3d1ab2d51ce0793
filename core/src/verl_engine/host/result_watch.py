"""Which of the plugins around a hook took its result away."""

from collections.abc import Callable, Generator

import pluggy

from verl_engine.contract.markers import hookimpl


class ResultWatch:
    """Wraps each hook that has a result, inside the observer that is registered next, and sees what that one gets."""

    def __init__(self, manager: pluggy.PluginManager) -> None:
        """Register it."""
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
