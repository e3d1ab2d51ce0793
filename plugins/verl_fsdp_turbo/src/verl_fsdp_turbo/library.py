"""The library as it is installed: whether it is there, what it can do, and its config made from ours.

Releases are told apart by what they have, not by a number.
"""

import dataclasses
import importlib
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final, Self

from verl_engine.contract.errors import ConfigError, PluginError, PluginImportError
from verl_fsdp_turbo.install_steps import INSTALL, MODULE, WITHOUT_PIP

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
    """Check that the library can be found; nothing of it is imported.

    Raises:
        PluginError: it cannot.
    """
    if importlib.util.find_spec(MODULE) is None:
        raise PluginError(
            f"backend fsdp_turbo needs Ascend's library FSDP-Turbo, and the module {MODULE} cannot be found. It is on "
            f"no package index; install it from its source, at the commit this was written for:\n  {INSTALL}\nor, in "
            f"place of pip, let Python find the clone in every process:\n  {WITHOUT_PIP}"
        )


@dataclass(frozen=True, slots=True)
class Library:
    """The parts of it that we use."""

    main: ModuleType
    configs: ModuleType
    state: ModuleType

    @classmethod
    def load(cls) -> Self:
        """Import it.

        Raises:
            PluginError: it is not there.
            PluginImportError: it is, and cannot be imported; the cause is chained.
        """
        require_library()
        try:
            return cls(
                importlib.import_module(f"{MODULE}.fsdp_turbo"),
                importlib.import_module(f"{MODULE}.fsdp_turbo_config"),
                importlib.import_module(f"{MODULE}.distributed.parallel_state"),
            )
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

        Args:
            values: as `library_config` gives them.
        Raises:
            ConfigError: this release does not know a key, or refuses a value.
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
