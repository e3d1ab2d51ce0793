"""The queue between rollouts and training: bounded, and nothing is ever dropped."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from verl_async.orchestrator.waiting import within

if TYPE_CHECKING:
    from verl_async.orchestrator.samples import ScoredGroup


class SampleQueue:
    """Holds at most `size` groups; a full queue makes rollouts wait, an empty one training."""

    def __init__(self, size: int) -> None:
        """Start empty."""
        self._size = size
        self._groups: deque[ScoredGroup] = deque()
        self._changed = asyncio.Condition()

    def __len__(self) -> int:
        """Return the number of groups waiting."""
        return len(self._groups)

    async def wait_for_room(self) -> None:
        """Wait until a group could be put in; the trainer's own time limits bound it."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) < self._size)

    async def put(self, group: ScoredGroup, timeout_s: float) -> None:
        """Add a group, waiting for room.

        Raises:
            StuckError: nothing was taken out for `timeout_s` seconds.
        """
        async with self._changed:
            while len(self._groups) >= self._size:
                trouble = f"the sample queue is full ({self._size} groups): the trainer took none"
                await within(timeout_s, trouble, self._changed.wait())
            self._groups.append(group)
            self._changed.notify_all()

    async def take(self, count: int, timeout_s: float) -> list[ScoredGroup]:
        """Take groups out one by one as they come, until there are `count`; so `count` may exceed the queue's size.

        Raises:
            StuckError: nothing was put in for `timeout_s` seconds.
        """
        taken: list[ScoredGroup] = []
        async with self._changed:
            while len(taken) < count:
                while not self._groups:
                    trouble = f"the trainer has {len(taken)} of {count} groups: the rollout workers brought none"
                    await within(timeout_s, trouble, self._changed.wait())
                taken.append(self._groups.popleft())
                self._changed.notify_all()
        return taken
