"""A rollout worker in memory."""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING

from verl_async.orchestrator.waiting import end
from verl_async.rollout.in_process import InlineTransport
from verl_async.rollout.interface import Acknowledgement, Completion, Generation
from verl_engine.engine.weights.bucket import combine_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from verl_async.orchestrator.actors import BucketDelivery
    from verl_async.rollout.interface import GenerationRequest, PauseMode, WeightTransport
    from verl_engine.engine.weights.bucket import WeightBucket

STOP = 99
"""The token that ends a fake answer."""


class FakeRollout:
    """Answers a prompt with its tokens counted up by one, one token each `token_s`; as a `RolloutClient`."""

    def __init__(self, index: int = 0, token_s: float = 0.0, num_tokens: int = 3) -> None:
        self.name = f"rollouter-{index}"
        self.token_s = token_s
        self.num_tokens = num_tokens
        self.version = 0
        self.calls: list[list[GenerationRequest]] = []
        self.sealed: list[bool] = []
        """For each call."""
        self.pauses: list[str] = []
        self.most_running = 0
        self.loading = False
        self.loaded: list[int] = []
        self.begun = (0, 0)
        self.tasks: set[asyncio.Task[None]] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._failures: asyncio.Queue[BaseException] = asyncio.Queue()
        self._aborted = False
        self._going = asyncio.Event()
        self._going.set()

    @property
    def generating(self) -> bool:
        return bool(self._running)

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        on_completion: Callable[[Completion], None],
        *,
        sealed: bool = False,
    ) -> None:
        self.calls.append(list(requests))
        self.sealed.append(sealed)
        for request in requests:
            task = asyncio.ensure_future(self._generate(request, on_completion))
            self.tasks.add(task)
            task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.put_nowait(error)

    async def serve(self) -> None:
        try:
            raise await self._failures.get()
        finally:
            await end(*self.tasks)

    async def _generate(self, request: GenerationRequest, on_completion: Callable[[Completion], None]) -> None:
        await self._going.wait()
        assert not self.loaded, "generates while weights are on their way"
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self.most_running = max(self.most_running, len(self._running))
        try:
            old = request.so_far[0] if request.so_far else Generation()
            row = Generation(list(old.token_ids), list(old.log_probs), list(old.weight_versions))
            await self.draw(row, request)
        finally:
            self._running.discard(task)
        on_completion(Completion(request, 0, row))

    async def draw(self, row: Generation, request: GenerationRequest) -> None:
        """Draw tokens to the end, or until aborted."""
        length = self.length(request)
        while (place := len(row.token_ids)) < length and not self._aborted:
            await asyncio.sleep(self.seconds(request))
            row.token_ids.append(STOP if place == length - 1 else request.prompt_ids[0] + place + 1)
            row.log_probs.append(-1.0 - place)
            row.weight_versions.append(self.version)
        row.finish_reason = "stop" if len(row.token_ids) == length else "interrupted"

    def seconds(self, _: GenerationRequest) -> float:
        """How long a token takes; tests override it."""
        return self.token_s

    def length(self, request: GenerationRequest) -> int:
        """How long an answer gets; tests override it."""
        return min(self.num_tokens, request.sampling.max_new_tokens)

    async def pause(self, mode: PauseMode) -> None:
        self.pauses.append(mode)
        self._going.clear()
        self._aborted = mode == "abort"
        if self._running:
            await asyncio.wait(self._running)

    async def resume(self) -> None:
        self._aborted = False
        self._going.set()

    async def begin_weights(self, version: int, plan: Sequence[WeightBucket], transport: WeightTransport) -> None:
        assert not self._going.is_set(), "new weights without a pause"
        assert not self.generating, "new weights while generating"
        assert isinstance(transport, InlineTransport)
        self.begun, self.loaded = (version, len(plan)), []

    async def load_bucket(self, delivery: BucketDelivery) -> None:
        assert not self.generating, "new weights while generating"
        assert not self.loading, "an engine loads one bucket at a time"
        self.loading = True
        try:
            await self.read(delivery)
        finally:
            self.loading = False

    async def read(self, delivery: BucketDelivery) -> None:
        """Look at the slot at both ends of reading; it must hold what was delivered."""
        slots, slot = delivery.handle
        for _ in range(2):
            assert zlib.crc32(str(slots[slot]).encode()) == delivery.checksum, "the slot was written while it was read"
            await asyncio.sleep(0)
        self.loaded.append(delivery.checksum)

    async def commit_weights(self, version: int) -> Mapping[str, Acknowledgement]:
        await asyncio.sleep(0)
        assert self.begun[0] == version
        self.version = version
        checksum = combine_checksums(self.loaded)
        self.loaded = []
        return {self.name: Acknowledgement(version, checksum)}

    async def save_pretrained(self, folder: Path) -> str:
        write_weights(folder, self.name)
        return f"version {self.version}, float32"


def write_weights(folder: Path, name: str) -> None:
    """Write a fake model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_text(name)
