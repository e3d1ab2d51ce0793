"""The library as it is installed: whether it is there, what it can do, and its config made from ours.

Releases are told apart by what they have, not by a number.
"""

import dataclasses
import importlib
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any, Final

from verl_engine.contract.errors import ConfigError, PluginError, PluginImportError

MODULE: Final = "fsdp_turbo"
_SOURCE: Final = "https://gitcode.com/Ascend/FSDPTurbo.git"
_READ_UNTIL: Final = "2026-09-01"
"""The newest release that this package was written for is the last commit before."""

INSTALL: Final = (
    f"git clone {_SOURCE} && "
    f'git -C FSDPTurbo checkout "$(git -C FSDPTurbo rev-list -n 1 --before={_READ_UNTIL} HEAD)" && '
    "python -m pip install -e FSDPTurbo"
)
"""One line for a shell."""
WITHOUT_PIP: Final = 'export PYTHONPATH="$PWD/FSDPTurbo:$PYTHONPATH"'
"""In place of the last part of it."""
_LOG: Final = logging.getLogger(__name__)
_SECTIONS: Final = {
    "distributed": "DistributedConfig",
    "fsdp_plan": "FSDPPlanConfig",
    "ep_plan": "EPPlanConfig",
    "cp_plan": "CPPlanConfig",
    "memory": "MemoryConfig",
    "chunk_batch_plan": "ChunkBatchPlanConfig",
}
"""The library's class for each section that is not a plain mapping."""


def require_library() -> None:
    """Raise PluginError where the library cannot be found; nothing of it is imported."""
    if importlib.util.find_spec(MODULE) is None:
        raise PluginError(
            f"backend fsdp_turbo needs Ascend's library FSDP-Turbo, and the module {MODULE} cannot be found. It is on "
            f"no package index; install it from its source, at the commit this was written for:\n  {INSTALL}\nor, in "
            f"place of pip, let Python find the clone in every process:\n  {WITHOUT_PIP}"
        )


class Library:
    """The parts of it that we use."""

    def __init__(self) -> None:
        """Import it; PluginError where it is not there, PluginImportError where that fails, with the cause."""
        require_library()
        try:
            self.main = importlib.import_module(f"{MODULE}.fsdp_turbo")
            self.configs = importlib.import_module(f"{MODULE}.fsdp_turbo_config")
            self.state = importlib.import_module(f"{MODULE}.distributed.parallel_state")
        except Exception as error:  # what is broken can raise anything
            import torch

            place = getattr(importlib.util.find_spec(MODULE), "submodule_search_locations", None)
            raise PluginImportError(
                f"the library {MODULE} in {list(place or ())} cannot be imported ({type(error).__name__}: {error}). "
                f"Its makers ask for torch from 2.9 to below 2.12, and this is {torch.__version__}; another cause may "
                f"be another release of the library. This was written for:\n  {INSTALL}"
            ) from error

    @property
    def can_reset(self) -> bool:
        """Whether its division of the ranks can be made anew in a process."""
        return hasattr(self.state, "reset_parallel_state")

    @property
    def capabilities(self) -> dict[str, bool]:
        """What releases differ in, by the library's names."""
        known = _fields(self.configs.CPPlanConfig)
        patches = ("ulysses_function_patches", "loss_function_patches")
        return {"reset_parallel_state": self.can_reset, **{name: name in known for name in patches}}

    def build_config(self, values: Mapping[str, Any]) -> Any:
        """Make the library's config, part by part; its own reader would drop what it does not know.

        Takes what `library_config` gives; ConfigError where this release does not know a key, or refuses a value.
        """
        _LOG.info("%s can: %s", MODULE, self.capabilities)
        try:
            return self._build(self.configs.FSDPTurboConfig, values, "")
        except (ValueError, AssertionError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{MODULE} refuses its config: {error}") from error

    def _build(self, section: type[Any], values: Mapping[str, Any], at: str) -> Any:
        known = _fields(section)
        arguments = {}
        for key, value in values.items():
            path = f"{at}.{key}" if at else key
            if key not in known:
                raise ConfigError(
                    f"the installed {MODULE} does not know {path}, and would ignore it; another release may. This was "
                    f"written for:\n  {INSTALL}"
                )
            name = _SECTIONS.get(key)
            is_section = name is not None and isinstance(value, dict)
            arguments[key] = self._build(getattr(self.configs, str(name)), value, path) if is_section else value
        return section(**arguments)


def _fields(section: type[Any]) -> frozenset[str]:
    return frozenset(entry.name for entry in dataclasses.fields(section))
