"""The observer ``timing``: how long each hook takes on this rank, in the metrics of each training step."""

from __future__ import annotations

from contextlib import contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from verl_engine.contract.markers import hookimpl

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from contextlib import AbstractContextManager

    _Context = AbstractContextManager[None]

Result = TypeVar("Result")


class Timing:
    """Adds ``timing/…`` to the metrics: seconds of wall time on this rank's host.

    An accelerator works on while the host has gone ahead: there the optimizer step, which waits for the norm, holds
    time that belongs to the micro-batches.
    """

    def __init__(self) -> None:
        """Start with every metric at zero: each step reports the same names."""
        self._once = {"engine_prepare_process_s": 0.0, "engine_create_s": 0.0}
        self._step = {"engine_gradient_sync_s": 0.0, "forward_backward_s": 0.0, "engine_optimizer_step_s": 0.0}

    def metrics(self) -> dict[str, float]:
        """Return the seconds since the last call, summed over micro-batches.

        ``engine_gradient_sync_s`` is the hook with entering and leaving its context, ``forward_backward_s`` is what was
        done inside. Those of ``engine_prepare_process`` and ``engine_create`` are of their last call, each time.
        """
        metrics = {**self._once, **self._step}
        self._step = dict.fromkeys(self._step, 0.0)
        return metrics

    @hookimpl(wrapper=True)
    def engine_prepare_process(self) -> Generator[None, Result, Result]:
        """Time the preparation."""
        start = perf_counter()
        try:
            return (yield)
        finally:
            self._once["engine_prepare_process_s"] = perf_counter() - start

    @hookimpl(wrapper=True)
    def engine_create(self) -> Generator[None, Result, Result]:
        """Time the building of the engine."""
        start = perf_counter()
        try:
            return (yield)
        finally:
            self._once["engine_create_s"] = perf_counter() - start

    @hookimpl(wrapper=True)
    def engine_gradient_sync(self) -> Generator[None, _Context | None, _Context | None]:
        """Time the hook, its context, and what is done inside."""
        start = perf_counter()
        try:
            context = yield
        finally:
            self._step["engine_gradient_sync_s"] += perf_counter() - start
        return None if context is None else self._timed(context)

    @hookimpl(wrapper=True)
    def engine_optimizer_step(self) -> Generator[None, Result, Result]:
        """Time the optimizer step."""
        start = perf_counter()
        try:
            return (yield)
        finally:
            self._step["engine_optimizer_step_s"] += perf_counter() - start

    @contextmanager
    def _timed(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """Enclose the context; leaving it may wait for a reduction."""
        start = perf_counter()
        entered = left = start
        try:
            with context:
                entered = perf_counter()
                try:
                    yield
                finally:
                    left = perf_counter()
        finally:
            self._step["forward_backward_s"] += left - entered
            self._step["engine_gradient_sync_s"] += (entered - start) + (perf_counter() - left)
