"""The ``evaluation`` section of a job."""

from __future__ import annotations

import re
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from verl_async.data_config import NamedPath
from verl_engine.contract.bounded import Count, CountOrZero, Ranks
from verl_engine.contract.strict_model import StrictModel

COLDEST: Final = 1e-4
"""Of sampling: logits divided by far less overflow."""


def _greedy_or_warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"must be 0, which takes the likeliest token, or at least {COLDEST:g}")
    return temperature


class EvaluationSetConfig(StrictModel):
    """Held-out prompts, and how they are answered."""

    prompts: NamedPath
    """Parquet or JSONL file of held-out prompts, in the columns of the training prompts."""
    num_prompts: Count = 256
    """The first so many rows."""
    num_samples: Ranks = 1
    """Responses to each prompt: the k of mean@k. pass@k is estimated for it and for the powers of two below it."""
    temperature: Annotated[float, AfterValidator(_greedy_or_warm)] = Field(default=1.0, ge=0, le=1e4)
    """Of sampling; 0 takes the likeliest token."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 keeps every token."""
    top_k: CountOrZero = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    correct_reward: float | None = None
    """In mean@k and pass@k a response is correct where its reward is at least this; by default where it is the ground
    truth, as for ``exact_match``."""
    stop_at_exact_match: float | None = Field(default=None, gt=0, le=1)
    """End training early once this share of the responses is exact; where several sets have one, once all are reached.
    Training then waits for each evaluation, so that the model which is saved is the one that reached it."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.temperature == 0 and (self.num_samples > 1 or self.top_p < 1 or self.top_k > 0):
            raise ValueError(
                f"temperature=0 takes the likeliest token, so num_samples={self.num_samples}, top_p={self.top_p:g} and "
                f"top_k={self.top_k} change nothing; leave them out, or set a temperature"
            )
        return self


def _named(sets: dict[str, EvaluationSetConfig]) -> dict[str, EvaluationSetConfig]:
    if not sets:
        raise ValueError("must name at least one set of prompts")
    for name in sets:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):  # it is part of names of metrics and settings
            raise ValueError(f"{name!r:.80} is no name of a set; use letters of a to z, digits, - and _, at most 64")
    return sets


class EvaluationConfig(StrictModel):
    """Held-out prompts, answered at the start, at the end, and in between, while training goes on."""

    sets: Annotated[dict[str, EvaluationSetConfig], AfterValidator(_named)]
    """Sets of prompts by names of your own, with which their metrics' names begin. Headlines are of the first."""
    every_steps: Count | None = None
    """Evaluate after so many training steps; by default only at the start and the end."""
