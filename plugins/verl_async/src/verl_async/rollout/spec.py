"""What a rollout engine says of itself before anything heavy is imported. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from verl_engine.contract.errors import HookError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.config import RolloutConfig

API_VERSION: Final = 2
FEATURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "seeds": "equal requests give equal tokens, whatever runs beside them",
        "sealed": "runs a batch whole and in order, with nothing beside it",
        "keep": "freezes requests in mid-generation, and goes on with them",
        "stop_strings": "ends a sample at a text",
        "filtered_log_probs": "gives log-probs over the whole vocabulary also under top-k and top-p",
        "affinity": "reads only what is new of a conversation's next turn",
        "routes": "says through which experts the tokens of prompt and response went",
        "save_pretrained": "writes its current weights as a model folder",
    }
)
"""What a rollout engine may be unable to do. All else is required of every engine."""


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """The torch-free self-description of a rollout engine, as ``SPEC`` of the module that its entry point names."""

    name: str
    """The name in the config; equal to the entry point's name."""
    config_class: type[RolloutConfig]
    """Validates the job's ``rollout`` section."""
    engine: str
    """``module:Class`` of the `RolloutEngine`."""
    devices: tuple[str, ...]
    """Device kinds it runs on: ``cpu``, ``cuda``, ``npu``."""
    gaps: Mapping[str, str] = field(default_factory=dict)
    """Reason for each missing one of `FEATURES`. What is not named here the engine has, and the kit proves it."""
    plugin_api_version: int = API_VERSION
    """The version of the interface that it was written for: write the number out."""

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ValueError: a gap is not one of `FEATURES`.
        """
        unknown = sorted(self.gaps.keys() - FEATURES.keys())
        if unknown:
            raise ValueError(f"gaps names unknown features {unknown}; they are {sorted(FEATURES)}")

    def require(self, feature: str) -> None:
        """Refuse what the engine says it cannot do.

        Raises:
            UnsupportedError: the engine declares the gap; gives its reason.
        """
        reason = self.gaps.get(feature)
        if reason is not None:
            raise UnsupportedError(f"rollout.backend={self.name} cannot do {feature!r}: {reason}")

    def load_engine(self) -> Any:
        """Import the engine's class.

        Raises:
            HookError: `engine` names none.
        """
        module, _, attribute = self.engine.partition(":")
        found = getattr(import_module(module), attribute, None)
        if not isinstance(found, type):
            raise HookError(
                f"rollout engine {self.name!r}: SPEC.engine={self.engine!r} must name a class, module:Class"
            )
        return found
