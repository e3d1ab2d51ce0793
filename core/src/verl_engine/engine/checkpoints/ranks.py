"""How the ranks of a world talk about a checkpoint, beside the collectives of training; waits name who is stuck."""

import datetime
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch.distributed as dist

from verl_engine.contract.errors import EngineError, StuckError, WeightsError

Value = TypeVar("Value")
_GRACE_S: Final = 10.0
"""By how much others wait longer than the first rank, which is the one that learns who is missing."""


class CheckpointRanks:
    """All ranks, in a gloo group of their own: it may be used in a thread while training uses others.

    Every method is a collective over it, called by all ranks in the same order.
    """

    def __init__(self, timeout_s: float) -> None:
        """Make the group, where there is more than one rank. Collectives: those of a new group, a barrier."""
        self.timeout_s = timeout_s
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if is_alone else dist.get_rank()
        self.size = 1 if is_alone else dist.get_world_size()
        self._group: dist.ProcessGroup | None = None
        if not is_alone:
            timeout = datetime.timedelta(seconds=timeout_s + 2 * _GRACE_S)
            self._group = dist.new_group(backend="gloo", timeout=timeout)
            # Gloo fails in a rank that still connects when another one, which is done, closes the group or ends.
            dist.barrier(self._group)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that creates and renames."""
        return self.rank == 0

    @property
    def patience_s(self) -> float:
        """How long to wait for a thread of this rank that waits for the others: a little longer than it does."""
        return self.timeout_s + 2 * _GRACE_S

    def barrier(self, doing: str) -> None:
        """Wait for all ranks; a StuckError where some do not come in time."""
        if self._is_alone:
            return
        wait_s = self.timeout_s + (0 if self.is_first else _GRACE_S)
        try:
            dist.monitored_barrier(self._group, datetime.timedelta(seconds=wait_s), wait_all_ranks=True)
        except RuntimeError as error:
            missing = re.search(r"Ranks? ([\d, ]+) failed to pass", str(error))
            who = (
                f"rank {missing[1]} did not come" if missing else "rank 0 did not go on; its message says who is stuck"
            )
            raise StuckError(f"{doing}: {who} within {wait_s:g} s (rank {self.rank} waited)") from error

    def gather(self, value: Value, doing: str) -> list[Value]:
        """Return every rank's value on the first rank, in rank order; elsewhere nothing."""
        if self._is_alone:
            return [value]
        self.barrier(doing)
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, group=self._group, dst=0)
        return values or []

    def scatter(self, values: list[Value], doing: str) -> Value:
        """Return this rank's of the values that the first rank has."""
        if self._is_alone:
            return values[0]
        self.barrier(doing)
        own: list[Any] = [None]
        dist.scatter_object_list(own, values or None, group=self._group, src=0)
        found: Value = own[0]
        return found

    def broadcast(self, value: Value, doing: str) -> Value:
        """Return the first rank's value everywhere."""
        return self.scatter([value] * self.size if self.is_first else [], doing)

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Do something inside on every rank, and go on only if it worked on all of them.

        Raises:
            StuckError: some did not come in time.
            WeightsError: it failed on some rank; the message is that of the lowest, and this rank's own is the cause.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever it is, every rank must know of it
            failure = error
        told = self.gather(None if failure is None else _text(failure), doing)
        failed = [f"rank {rank}: {text}" if self.size > 1 else text for rank, text in enumerate(told) if text]
        verdict = self.broadcast(failed[0] if failed else "", doing)
        if verdict:
            raise WeightsError(f"{doing}: {verdict}") from failure

    @property
    def _is_alone(self) -> bool:
        if self._group is None and self.size > 1:
            raise WeightsError("this store of checkpoints is closed: its ranks no longer hear each other; make another")
        return self._group is None

    def close(self) -> None:
        """Give up the group. Harmless when called twice, and after all groups are gone."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def _text(failure: Exception) -> str:
    if isinstance(failure, EngineError):
        return str(failure)
    cause: BaseException | None = failure
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    # On a full disk torch says "unexpected pos", while it handles the error that says what it is.
    return f"{type(cause or failure).__name__}: {cause or failure}"
