"""Names of the built-in workflows, and what they stand for."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

WORKFLOWS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "single_turn": "verl_async.orchestrator.workflow:SingleTurn",
        "multi_turn": "verl_async.orchestrator.multi_turn:MultiTurn",
    }
)
