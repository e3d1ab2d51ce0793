"""Rollout engines are plugins of a kind that this package brings. Imports no torch."""

from types import MappingProxyType
from typing import Final

from verl_engine.contract.kinds import KindSpec

ROLLOUT: Final = KindSpec(
    name="rollout",
    group="verl_async.rollouts",
    chosen_by="rollout.engine",
    called="rollout engine",
    api_version=1,
    api_keyword="verl-async-rollout-api-",
    owner="verl-async",
    known=MappingProxyType({"embedded": "verl-async"}),
)
