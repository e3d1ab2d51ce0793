"""The two pluggy markers, and the names that tie core and plugins together."""

from typing import Final

import pluggy

from verl_engine.contract.names import BACKENDS_GROUP, COMMANDS_GROUP, PLUGIN_API_VERSION, PROJECT_NAME

__all__ = ["BACKENDS_GROUP", "COMMANDS_GROUP", "PLUGIN_API_VERSION", "PROJECT_NAME", "hookimpl", "hookspec"]

hookspec: Final = pluggy.HookspecMarker(PROJECT_NAME)
hookimpl: Final = pluggy.HookimplMarker(PROJECT_NAME)
