"""Names and numbers that tie core and plugins together. Imports nothing: listing plugins must stay quick."""

from typing import Final

PROJECT_NAME: Final = "verl_engine"
"""The pluggy project name: markers and plugin managers must agree on it."""

PLUGIN_API_VERSION: Final = 2
"""Raised when a hook or the Engine base class changes in a way that breaks existing plugins."""

BACKENDS_GROUP: Final = "verl_engine.backends"
COMMANDS_GROUP: Final = "verl_engine.commands"
OBSERVERS_GROUP: Final = "verl_engine.observers"

API_KEYWORD: Final = "verl-engine-api-"
"""A plugin's pyproject says ``keywords = ["verl-engine-api-2", …]``, so that its API version is known unimported."""
DEVICE_KEYWORD: Final = "verl-engine-device-"
"""Likewise ``verl-engine-device-cpu`` and so on, one for each kind of device it runs on."""
MODULE_KEYWORD: Final = "verl-engine-module-"
"""Likewise ``verl-engine-module-NAME`` for a module that the plugin needs and that is on no package index."""
