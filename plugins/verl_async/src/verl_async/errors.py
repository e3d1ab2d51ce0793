"""Errors of this package: additions to the tree of `verl_engine.contract.errors`."""

from verl_engine.contract.errors import EngineError


class DataError(EngineError):
    """A prompt or example file cannot be used; the message gives the file and the line or row."""


class RewardError(EngineError):
    """A reward function failed, took too long or did not return a number; the message gives the sample's id."""


class RolloutError(EngineError):
    """A rollout engine is closed, or has failed."""
