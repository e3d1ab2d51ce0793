"""The kinds of plugins that there are: the core's own, and those that packages bring."""

from verl_engine.contract.errors import HookError, PluginError
from verl_engine.contract.kinds import CORE_KINDS, KIND, KindSpec
from verl_engine.host.catalog import list_plugins
from verl_engine.host.loading import load_plugin


def all_kinds() -> list[KindSpec]:
    """Return every kind that can be used; one that is broken is told where the plugins of kind ``kind`` are listed."""
    kinds = list(CORE_KINDS)
    for entry in list_plugins(KIND):
        if not entry.problem:
            try:
                kinds.append(find_kind(entry.name))
            except PluginError:
                continue
    return kinds


def find_kind(name: str, at: str = "") -> KindSpec:
    """Return one kind by name, imported if it is not the core's own; a PluginError where there is none."""
    own = {kind.name: kind for kind in CORE_KINDS}
    if name in own:
        return own[name]
    plugin = load_plugin(KIND, name, at)
    kind = plugin.plugin
    if not isinstance(kind, KindSpec) or kind.name != name:
        raise HookError(f"{plugin.entry.label}: {plugin.entry.value} must be a KindSpec with name={name!r}")
    return kind
