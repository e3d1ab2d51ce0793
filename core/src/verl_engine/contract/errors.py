"""The errors of the system: one small tree, so that callers can catch what they can fix."""


class EngineError(Exception):
    """Root of every error that this project raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A configuration cannot be used as it stands; nothing was started."""


class PluginError(EngineError):
    """Something chosen by name (a backend, a rollout engine, a command) could not be used."""


class UnknownPluginError(PluginError):
    """No installed distribution offers the name."""


class PluginImportError(PluginError):
    """The name is known, but importing what it points to failed; the cause is chained."""


class DuplicatePluginError(PluginError):
    """Two installed distributions offer the same name."""


class PluginApiVersionError(PluginError):
    """The plugin was written for another version of the plugin API."""


class HookError(PluginError):
    """A plugin's hooks do not fit the hookspecs, or required ones are missing."""


class ImportOrderError(PluginError):
    """A module was imported before the backend could prepare the process for it, or the process is not prepared."""


class PatchError(PluginError):
    """A declared patch did not take, or somebody still holds the original."""


class PreparationConflictError(PluginError):
    """The process was prepared already, with other settings or for a backend that this one cannot live with."""


class ModelError(EngineError):
    """A model folder is missing, incomplete or of a kind that the engine cannot run."""


class UnsupportedError(EngineError):
    """The chosen backend says that it cannot do what was asked; the message gives its reason."""


class BatchError(EngineError, ValueError):
    """A batch breaks the rules that all ranks rely on."""


class TrainingDivergedError(EngineError):
    """Too many optimizer steps in a row were skipped for non-finite gradients."""


class WeightsError(EngineError):
    """Weights arrived incomplete, corrupted or with another version than announced."""


class StuckError(EngineError, TimeoutError):
    """A wait passed its time limit; the message names who did not respond."""
