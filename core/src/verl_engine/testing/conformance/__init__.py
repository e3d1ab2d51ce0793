"""The conformance kit: proves any installed engine backend right, without its source.

As a command: ``verl-engine check NAME``. In a backend's own tests:

    from verl_engine.testing.conformance import EngineConformance


    class TestMine(EngineConformance):
        backend = "mine"
        settings = {"fused": True}  # further fields of the engine section, if any
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_engine.testing.conformance.catalogue import all_checks
    from verl_engine.testing.conformance.check import Check
    from verl_engine.testing.conformance.inheritable import EngineConformance
    from verl_engine.testing.conformance.kit import ConformanceKit
    from verl_engine.testing.kits import Outcome

_HOMES = {
    "Check": "check",
    "ConformanceKit": "kit",
    "EngineConformance": "inheritable",  # needs pytest
    "Outcome": "kit",
    "all_checks": "catalogue",
}

__all__ = ["Check", "ConformanceKit", "EngineConformance", "Outcome", "all_checks"]


def __getattr__(name: str) -> object:
    """Import a public name at its first use: the command needs no pytest, and ranks import torch only when prepared."""
    import importlib

    if name in _HOMES:
        found: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
