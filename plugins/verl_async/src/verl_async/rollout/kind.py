"""Rollout engines are plugins of a kind that this package brings. Imports no torch."""

from types import MappingProxyType
from typing import Final

from verl_async.rollout.spec import API_VERSION
from verl_engine.contract.kinds import KindSpec

ROLLOUT: Final = KindSpec(
    name="rollout",
    group="verl_async.rollouts",
    chosen_by="rollout.backend",
    called="rollout engine",
    api_version=API_VERSION,
    api_keyword="verl-async-rollout-api-",
    owner="verl-async",
    spec_class="verl_async.rollout.spec:RolloutSpec",
    config_class="verl_async.config:RolloutConfig",
    kit="verl_async.rollout.kit.kit:RolloutKit",
    known=MappingProxyType({"embedded": "verl-async"}),
)
