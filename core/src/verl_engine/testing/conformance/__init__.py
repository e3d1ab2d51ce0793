"""The conformance kit: proves any installed engine backend right, without its source.

As a command: ``verl-engine check NAME``. In a backend's own tests:

    from verl_engine.testing.conformance import EngineConformance


    class TestMine(EngineConformance):
        backend = "mine"
        settings = {"fused": True}  # further fields of the engine section, if any
"""

from typing import TYPE_CHECKING

from verl_engine.testing.conformance.check import Check, all_checks
from verl_engine.testing.conformance.kit import ConformanceKit
from verl_engine.testing.kits import Outcome

if TYPE_CHECKING:
    from verl_engine.testing.conformance.inheritable import EngineConformance

__all__ = ["Check", "ConformanceKit", "EngineConformance", "Outcome", "all_checks"]


def __getattr__(name: str) -> object:
    """Import what needs pytest at its first use: the command needs none."""
    if name == "EngineConformance":
        from verl_engine.testing.conformance.inheritable import EngineConformance

        return EngineConformance
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
