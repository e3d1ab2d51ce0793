"""Scoring responses: the built-in exact match, or a user's function with verl's signature."""

from __future__ import annotations

import inspect
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from verl_async.data.rows import shorten
from verl_async.references import load_reference, make
from verl_async.reward_config import EXACT_MATCH
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from verl_async.data.prompts import Prompt
    from verl_async.reward_config import RewardFunctionConfig

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Names under which a reward function gets its arguments; verl's."""

LARGEST: Final = float(np.finfo(np.float32).max)
"""Of a reward: advantages are float32."""


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:  # noqa: ARG001
    """Return 1.0 if the response is the ground truth, as text and apart from white space around it, else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


@dataclass(frozen=True, slots=True)
class Sample:
    """A response to be scored."""

    prompt: Prompt
    solution: str
    """The response, as text."""
    sample_id: str
    """For messages."""

    @property
    def arguments(self) -> dict[str, Any]:
        """What a reward function is called with."""
        prompt = self.prompt
        values = (prompt.data_source, self.solution, prompt.ground_truth, prompt.extra_info)
        return dict(zip(ARGUMENTS, values, strict=True))

    @property
    def is_exact(self) -> bool:
        """Whether the response is the ground truth, whatever the reward functions are."""
        return exact_match(**self.arguments) == 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """What one function says of a sample."""

    score: float
    metrics: Mapping[str, float]
    """The other numbers of its mapping."""


def read_result(value: object) -> Result:
    """Read what a function returned: a number, or a mapping with one under ``score``.

    Raises:
        ValueError: it is neither, or out of float32's range; the text goes on a message that names the sample.
    """
    expected = "expected a finite number of float32's range, or a mapping with one under 'score'"
    score = _number(value.get("score") if isinstance(value, dict) else value)
    if score is None or not abs(score) <= LARGEST:  # nor where it is nan
        raise ValueError(f"gave {shorten(value)}; {expected}")
    others = {str(key): _number(item) for key, item in value.items()} if isinstance(value, dict) else {}
    return Result(score, {key: item for key, item in others.items() if item is not None and key != "score"})


def _number(value: object) -> float | None:
    if not isinstance(value, numbers.Real | np.bool_):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf")


def load_reward(config: RewardFunctionConfig, at: str = "reward") -> Callable[..., object]:
    """Find the reward function that a job names.

    Args:
        config: its settings.
        at: their dotted path; for messages.
    Raises:
        ConfigError: it cannot be imported (the cause is chained), is no function or class of one, takes other arguments
            than verl's, or other settings.
    """
    if config.function == EXACT_MATCH:
        return exact_match
    place = f"{at}.function={config.function}"
    found = make(load_reference(config.function, place, "function"), config.config, place, f"{at}.config")
    expected = f"expected a function ({', '.join(ARGUMENTS)}) -> float"
    if not callable(found):
        raise ConfigError(f"{place}: its objects cannot be called; {expected}")
    function = cast("Callable[..., object]", found)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have none; then the first call shows
        return function
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise ConfigError(f"{place}: takes {signature} ({error}); {expected}") from error
    return function


def is_async(function: Callable[..., object]) -> bool:
    """Tell whether a function, or an object that is called, is to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
