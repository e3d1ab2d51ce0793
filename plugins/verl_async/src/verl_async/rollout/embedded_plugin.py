"""The embedded rollout engine's description. Imports no torch."""

from typing import Final

from verl_async.config import RolloutConfig
from verl_async.rollout.spec import RolloutSpec
from verl_engine.contract.bounded import Count, Ranks


class EmbeddedConfig(RolloutConfig):
    """What only the embedded engine has."""

    max_cache_tokens: Count = 2**17
    """Room of the key-value cache: samples decoded at once times the tokens of the longest, and what is kept of
    conversations. Where samples outgrow it, those that came last wait and are read again."""
    max_running: Ranks = 512
    """Samples decoded at once; more wait."""


SPEC: Final = RolloutSpec(
    name="embedded",
    config_class=EmbeddedConfig,
    engine="verl_async.rollout.embedded:EmbeddedEngine",
    devices=("cpu", "cuda", "npu"),
    plugin_api_version=2,
)
