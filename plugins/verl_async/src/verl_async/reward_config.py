"""The ``reward`` section of a job."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, model_validator

from verl_async.references import known_or_reference
from verl_engine.contract.strict_model import StrictModel

EXACT_MATCH: Final = "exact_match"
"""The built-in reward."""
LONGEST_S: Final = 100_000_000
"""Of a time limit: three years. Far longer ones overflow where clocks count in integers."""


def _known_or_reference(function: str) -> str:
    return known_or_reference(function, (EXACT_MATCH,))


FunctionName = Annotated[str, AfterValidator(_known_or_reference)]
AtOnce = Annotated[int, Field(ge=1, le=1024)]
Text = Annotated[str, Field(min_length=1)]


class RewardFunctionConfig(StrictModel):
    """One of several rewards."""

    function: FunctionName = EXACT_MATCH
    """As `reward.function`."""
    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """In the names of metrics; by default that of the function, without its module."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Its score counts so many times; 0 only makes metrics."""
    data_sources: tuple[Text, ...] | None = Field(default=None, min_length=1)
    """Scores prompts with these ``data_source`` values only; by default all."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings for the ``Config`` of the function, where that is a class with one."""

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name or split_label(self.function)

    def scores(self, data_source: str) -> bool:
        """Tell whether prompts of a data source are its own."""
        return self.data_sources is None or data_source in self.data_sources

    @model_validator(mode="after")
    def _check(self) -> RewardFunctionConfig:
        check_settings(self.function, self.config)
        return self


class RewardConfig(StrictModel):
    """How a response is scored."""

    function: FunctionName | None = None
    """``exact_match``, which is taken by default, or ``module:attribute`` of a function (data_source, solution_str,
    ground_truth, extra_info) -> float, or -> a mapping with one under ``score``; it may be async. Or of a class whose
    objects are called so."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Settings for the ``Config`` of the function, where that is a class with one."""
    functions: tuple[RewardFunctionConfig, ...] = ()
    """Several rewards, in place of `function`. A sample's reward is the weighted sum of those for its
    ``data_source``."""
    timeout_s: float = Field(default=60.0, gt=0, le=LONGEST_S)
    """For one call of a function. A call that takes longer is ended with its process, which is replaced."""
    on_error: Literal["stop", "zero", "drop"] = "stop"
    """What a call costs that raises, hangs or gives no number: the job (stop), the score, which counts as 0 (zero), or
    the sample, which leaves its group (drop); a group with fewer than two samples left is not trained on."""
    num_processes: AtOnce = 1
    """Processes for each function, at most: one is started when all others are busy. Each scores one sample at a time,
    or many if the function is async."""
    max_async_calls: AtOnce = 64
    """Calls of an async function that one process awaits at once."""

    @property
    def all_functions(self) -> tuple[tuple[str, RewardFunctionConfig], ...]:
        """The functions, each with the dotted path of its settings."""
        if self.functions:
            return tuple((f"reward.functions[{index}]", one) for index, one in enumerate(self.functions))
        return (("reward", RewardFunctionConfig(function=self.function or EXACT_MATCH, config=self.config)),)

    def longest_s(self, num_samples: int) -> float:
        """Return how long scoring may take where every call runs into its time limit."""
        rounds = -(-num_samples // self.num_processes)
        return rounds * self.timeout_s * max(1, len(self.functions))

    @model_validator(mode="after")
    def _check(self) -> RewardConfig:
        if self.functions and (self.function is not None or self.config):
            raise ValueError("function and config say what functions says of several rewards; give one or the other")
        check_settings(self.function or EXACT_MATCH, self.config)
        labels = [one.label for one in self.functions]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"functions: {twice[0]!r} stands for several in the metrics; give each a name of its own")
        return self


def split_label(function: str) -> str:
    """Return the last part of a function's name."""
    return function.rpartition(":")[2].rpartition(".")[2]


def check_settings(function: str, config: dict[str, Any]) -> None:
    """Refuse settings that nothing reads.

    Raises:
        ValueError: the built-in reward has none.
    """
    if function == EXACT_MATCH and config:
        raise ValueError(f"config={config}: {EXACT_MATCH} takes no settings; leave them out")
