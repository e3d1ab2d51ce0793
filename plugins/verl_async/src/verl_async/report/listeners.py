"""Several listeners behind one."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from verl_async.orchestrator.listener import JobListener
from verl_async.report.saying import describe, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType


class _Closable(JobListener, Protocol):
    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None: ...


class Listeners:
    """Passes every event on to each listener, in order. One that fails is switched off: it never ends a job."""

    def __init__(self, listeners: Sequence[JobListener]) -> None:
        """Keep the listeners."""
        self._listeners = list(listeners)
        self.failures: list[tuple[JobListener, BaseException]] = []
        """Those that were switched off, and why."""

    @contextmanager
    def also(self, listener: _Closable) -> Iterator[None]:
        """Have one more inside, which is opened and closed."""
        self._listeners.append(listener)
        self._guarded(listener, listener.__enter__)
        try:
            yield
        finally:
            self._guarded(listener, partial(listener.__exit__, None, None, None))

    def on_status(self, text: str) -> None:
        """Pass on what the job does now."""
        self._tell("on_status", text)

    def on_note(self, text: str) -> None:
        """Pass on what is said of the job."""
        self._tell("on_note", text)

    def on_step(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of a step."""
        self._tell("on_step", step, num_steps, metrics)

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on the metrics of an evaluation."""
        self._tell("on_evaluation", step, metrics)

    def _tell(self, event: str, *arguments: Any) -> None:
        for listener in tuple(self._listeners):
            self._guarded(listener, partial(getattr(listener, event), *arguments))

    def _guarded(self, listener: JobListener, call: Callable[[], object]) -> None:
        """Call a listener; whatever it raises (a full disk, a closed terminal), training goes on."""
        try:
            call()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - see above; rich exits where a pipe is closed
            if listener in self._listeners:
                self._listeners.remove(listener)
                self.failures.append((listener, error))
                name = type(listener).__name__
                warn(f"{name} failed and is switched off; the job goes on. {describe(error)}")
