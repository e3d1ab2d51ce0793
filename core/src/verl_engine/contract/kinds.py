"""The kinds of plugins. Imports next to nothing: listing plugins must stay quick."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from verl_engine.contract.names import API_KEYWORD, BACKENDS_GROUP, COMMANDS_GROUP, OBSERVERS_GROUP, PLUGIN_API_VERSION


class KindSpec(NamedTuple):
    """What the one loader has to know of a kind of plugin. It needs no torch, and names what does by texts.

    A package brings a kind of its own by an entry point in the group ``verl_engine.kinds`` that points to one of these,
    under the same name.
    """

    name: str
    """Such as ``backend``: what ``verl-engine check NAME --kind`` takes."""
    group: str
    """The group of entry points in which plugins of this kind stand."""
    chosen_by: str
    """Where a name of this kind is written, such as ``engine.backend``; the last part is the key in its section."""
    called: str = ""
    """What messages call a plugin of this kind, where that is not `name`."""
    api_version: int = PLUGIN_API_VERSION
    """The version of the interface that plugins of this kind are written for."""
    api_keyword: str = API_KEYWORD
    """With the version behind it, a keyword of a plugin's distribution: known before the plugin is imported."""
    owner: str = "verl-engine-core"
    """The distribution that brings the kind: what to upgrade where a plugin is written for a newer version."""
    spec_class: str = ""
    """``module:class`` of what a plugin says of itself: it is a module then, and has one of these as ``SPEC``."""
    config_class: str = ""
    """``module:class`` of which the ``config_class`` of a SPEC must be a subclass."""
    kit: str = ""
    """``module:class`` of the kit that proves a plugin of this kind (see `verl_engine.testing.kits`); "" for none."""
    known: Mapping[str, str] = MappingProxyType({})
    """The distribution of each plugin of this kind that this project has, so that it can be named where it is not
    installed."""
    reserved: frozenset[str] = frozenset()
    """Names that no plugin can have."""

    @property
    def title(self) -> str:
        """What messages call a plugin of this kind."""
        return self.called or self.name


BACKEND: Final = KindSpec(
    name="backend",
    group=BACKENDS_GROUP,
    chosen_by="engine.backend",
    spec_class="verl_engine.contract.backend:BackendSpec",
    config_class="verl_engine.contract.engine_config:EngineConfig",
    kit="verl_engine.testing.conformance.kit:ConformanceKit",
    known=MappingProxyType(
        {
            "fsdp2": "verl-fsdp",
            "fsdp": "verl-fsdp",
            "fsdp_turbo": "verl-fsdp-turbo",
            "megatron": "verl-megatron-mindspeed",
        }
    ),
)
OBSERVER: Final = KindSpec(
    name="observer",
    group=OBSERVERS_GROUP,
    chosen_by="engine.observers",
    known=MappingProxyType({"timing": "verl-engine-core"}),
)
COMMAND: Final = KindSpec(
    name="command",
    group=COMMANDS_GROUP,
    chosen_by="verl-engine COMMAND",
    known=MappingProxyType({"train": "verl-async", "sft": "verl-async"}),
    reserved=frozenset({"backends", "check", "checkpoint", "doctor", "new-backend", "plugins"}),
)
KIND: Final = KindSpec(
    name="kind",
    group="verl_engine.kinds",
    chosen_by="--kind",
    called="kind of plugin",
    known=MappingProxyType({"rollout": "verl-async"}),
    reserved=frozenset({"backend", "observer", "command", "kind"}),
)
"""Kinds are plugins too: what is wrong with one is told as it is for any other."""

CORE_KINDS: Final = (BACKEND, OBSERVER, COMMAND, KIND)
