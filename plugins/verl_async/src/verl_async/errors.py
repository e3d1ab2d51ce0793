"""Errors of this package: additions to the tree of `verl_engine.contract.errors`."""

from verl_engine.contract.errors import EngineError


class DataError(EngineError):
    """A prompt or example file cannot be used; the message gives the file and the line or row."""


class OverlongError(DataError):
    """A row has more tokens than allowed; the message gives the row, both numbers and the setting."""


class RewardError(EngineError):
    """A reward function failed, took too long or did not return a number; the message gives the sample's id."""


class RolloutError(EngineError):
    """A rollout engine is closed, or has failed."""


class WorkflowError(EngineError):
    """A workflow raised, or did not return trajectories; the message gives the sample's id."""
