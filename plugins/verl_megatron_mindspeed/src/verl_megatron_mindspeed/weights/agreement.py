"""Something that every rank does and that may fail on one: then all of them raise, so none waits forever."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from verl_engine.contract.errors import EngineError, ModelError

Result = TypeVar("Result")


def on_all_ranks(function: Callable[[], Result], what: str) -> list[Result]:
    """Call something without collectives on every rank, and return all small results; where one fails, all raise.

    Raises:
        ModelError: on the ranks where nothing was wrong; on the others their own error.
    Collectives: an all-gather of the results.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = function()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        failure = error
    own = (result, "" if failure is None else f"{type(failure).__name__}: {failure}")
    told: list[tuple[Any, str]] = [own]
    if num_ranks() > 1:
        told = told * num_ranks()
        dist.all_gather_object(told, own)
    if isinstance(failure, EngineError):
        raise failure
    for rank, (_, text) in enumerate(told):
        if text:
            raise ModelError(f"{what}: rank {rank} failed: {text}") from failure
    return [found for found, _ in told]


def num_ranks() -> int:
    """Return how many there are in the world."""
    return dist.get_world_size() if dist.is_initialized() else 1
