"""Scoring answers: the built-in exact match, or a user's function with verl's signature."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import numbers
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from verl_async.data.rows import shorten
from verl_async.errors import RewardError
from verl_engine.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from verl_async.config import RewardConfig
    from verl_async.data.prompts import Prompt

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Names under which a reward function gets its arguments; verl's."""

_LARGEST: Final = float(np.finfo(np.float32).max)
"""Advantages are float32."""


def exact_match(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:  # noqa: ARG001
    """Return 1.0 if the answer is the ground truth, as text and apart from white space around it, else 0.0."""
    return float(solution_str.strip() == str(ground_truth).strip())


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function with its limits."""

    function: Callable[..., object]
    """Called with the keywords in `ARGUMENTS`."""
    name: str
    """Its name in the config; for messages."""
    timeout_s: float
    """For one call."""

    def score(self, prompt: Prompt, solution: str, sample_id: str) -> float:
        """Score one answer. Thread-safe if the function is.

        A user's function runs in a thread of its own, so that the time limit holds; it therefore cannot use signals. A
        call that passed the limit is left behind: Python cannot end it.

        Args:
            prompt: what was asked.
            solution: the answer, as text.
            sample_id: which sample it is; for messages.
        Raises:
            RewardError: the function raised, took longer than ``timeout_s``, or returned no finite number (alone, or as
                ``score`` in a mapping).
        """
        arguments = dict(
            zip(ARGUMENTS, (prompt.data_source, solution, prompt.ground_truth, prompt.extra_info), strict=True)
        )
        if self.function is exact_match:
            # Never stuck; a thread for each call would take longer than the scoring.
            return exact_match(**arguments)
        where = f"reward.function={self.name}: sample {sample_id} (prompt row {prompt.index})"
        call = _Call(self.function, arguments)
        thread = threading.Thread(target=call.run, name=f"reward of {sample_id}", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if thread.is_alive():
            raise RewardError(
                f"{where} is stuck: no score after reward.timeout_s={self.timeout_s:g} seconds, for the answer "
                f"{shorten(solution)}; fix the function or raise the limit"
            )
        if call.error is not None:
            kind = type(call.error).__name__
            raise RewardError(
                f"{where} raised {kind}: {call.error}; for the answer {shorten(solution)}"
            ) from call.error
        return _number(call.result, where)

    def is_exact(self, prompt: Prompt, solution: str) -> bool:
        """Tell whether an answer is the ground truth, whatever the reward function is."""
        return exact_match(prompt.data_source, solution, prompt.ground_truth, prompt.extra_info) == 1.0


class _Call:
    """One call of a reward function and what came of it."""

    def __init__(self, function: Callable[..., object], arguments: dict[str, Any]) -> None:
        self.function = function
        self.arguments = arguments
        self.result: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            # Each call has arguments of its own: a function that changes them does not change the next call's.
            self.result = self.function(**copy.deepcopy(self.arguments))
        except BaseException as error:  # noqa: BLE001 - raised again, as the cause, in the thread that waits
            self.error = error


def _number(result: object, where: str) -> float:
    expected = "expected a finite number of float32's range, or a mapping with one under 'score'"
    value = result.get("score") if isinstance(result, dict) else result
    if not isinstance(value, numbers.Real | np.bool_):
        raise RewardError(f"{where} gave {shorten(result)}; {expected}")
    try:
        score = float(value)
    except OverflowError as error:
        raise RewardError(f"{where} gave {shorten(result)}; {expected}") from error
    if not abs(score) <= _LARGEST:  # nor where it is nan
        raise RewardError(f"{where} gave {shorten(result)}; {expected}")
    return score


def load_reward(config: RewardConfig, field: str = "reward.function") -> Reward:
    """Find the reward function that a job names.

    Args:
        config: the validated ``reward`` section.
        field: dotted path of the field that names the function; for messages.
    Raises:
        ConfigError: it cannot be imported (the cause is chained), is no function, or takes other arguments than verl's.
    """
    place = f"{field}={config.function}"
    if config.function == "exact_match":
        return Reward(exact_match, config.function, config.timeout_s)
    module_name, _, attribute = config.function.rpartition(".")
    if not all(part.isidentifier() for part in config.function.split(".")) or not module_name:
        raise ConfigError(f"{place}: expected 'exact_match' or a dotted path, such as my_rewards.score")
    function = getattr(_import(module_name, place), attribute, None)
    if not callable(function):
        raise ConfigError(
            f"{place}: module {module_name} has no function {attribute!r}; define it there, or correct the path"
        )
    _check_signature(function, place)
    return Reward(function, config.function, config.timeout_s)


def _import(module_name: str, place: str) -> object:
    # A console script does not look into the current folder, where users keep their functions. For good and last: the
    # module may import its neighbours later, and must not hide an installed package.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except SystemExit as error:
        raise ConfigError(
            f"{place}: module {module_name}{_file_of(module_name)} cannot be imported: it calls "
            f"sys.exit({error.code!r}); put what it does as a script under `if __name__ == '__main__':`"
        ) from error
    except BaseException as error:
        raise ConfigError(
            f"{place}: module {module_name}{_file_of(module_name)} cannot be imported ({type(error).__name__}: "
            f"{error}); install it, or put it into the current folder {folder}"
        ) from error


def _file_of(module_name: str) -> str:
    """Name the file of a module that could not be imported, in brackets, where there is one."""
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception:  # noqa: BLE001 - finding a module may run its package
        return ""
    return f" ({spec.origin})" if spec is not None and spec.origin else ""


def _check_signature(function: Callable[..., object], place: str) -> None:
    expected = f"expected a function ({', '.join(ARGUMENTS)}) -> float"
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{place}: is an async function; {expected}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # some compiled functions have none; then the first call shows
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        raise ConfigError(f"{place}: takes {signature} ({error}); {expected}") from error
