"""The plugins of this project by name, so that a missing one can be answered with its install command."""

from typing import Final

from verl_engine.contract.names import BACKENDS_GROUP, COMMANDS_GROUP, OBSERVERS_GROUP

_ROLLOUTS_GROUP: Final = "verl_async.rollouts"

KINDS: Final = {
    BACKENDS_GROUP: "backend",
    COMMANDS_GROUP: "command",
    OBSERVERS_GROUP: "observer",
    _ROLLOUTS_GROUP: "rollout engine",
}
"""What a plugin of a group is called in messages."""

KNOWN_PLUGINS: Final = {
    (BACKENDS_GROUP, "fsdp2"): "verl-fsdp",
    (BACKENDS_GROUP, "fsdp"): "verl-fsdp",
    (BACKENDS_GROUP, "fsdp_turbo"): "verl-fsdp-turbo",
    (BACKENDS_GROUP, "megatron"): "verl-megatron-mindspeed",
    (_ROLLOUTS_GROUP, "embedded"): "verl-async",
    (OBSERVERS_GROUP, "timing"): "verl-engine-core",
    (COMMANDS_GROUP, "train"): "verl-async",
    (COMMANDS_GROUP, "sft"): "verl-async",
}
"""Distribution that offers each name of a group; a new plugin adds its own when it is there to be installed."""


def kind_of(group: str) -> str:
    """Say what a plugin of the group is called."""
    return KINDS.get(group, f"{group} plugin")
