"""The observer ``timing``: how long each hook takes on this rank, in the metrics of each training step."""

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import TypeVar

from verl_engine.contract.markers import hookimpl

Context = AbstractContextManager[None]
Result = TypeVar("Result")


@contextmanager
def _adding(times: dict[str, float], name: str) -> Iterator[None]:
    start = perf_counter()
    try:
        yield
    finally:
        times[name] += perf_counter() - start


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
        self._once["engine_prepare_process_s"] = 0.0
        with _adding(self._once, "engine_prepare_process_s"):
            return (yield)

    @hookimpl(wrapper=True)
    def engine_create(self) -> Generator[None, Result, Result]:
        """Time the building of the engine."""
        self._once["engine_create_s"] = 0.0
        with _adding(self._once, "engine_create_s"):
            return (yield)

    @hookimpl(wrapper=True)
    def engine_gradient_sync(self) -> Generator[None, Context | None, Context | None]:
        """Time the hook, its context, and what is done inside."""
        with _adding(self._step, "engine_gradient_sync_s"):
            context = yield
        return None if context is None else self._timed(context)

    @hookimpl(wrapper=True)
    def engine_optimizer_step(self) -> Generator[None, Result, Result]:
        """Time the optimizer step."""
        with _adding(self._step, "engine_optimizer_step_s"):
            return (yield)

    @contextmanager
    def _timed(self, context: Context) -> Iterator[None]:
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
