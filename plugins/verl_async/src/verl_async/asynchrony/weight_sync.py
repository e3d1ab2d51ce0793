"""New weights from the trainer to every rollout worker, bucket by bucket, acknowledged by version and checksum."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_async.asynchrony.waiting import within
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.weight_bucket import combine_checksums

if TYPE_CHECKING:
    from verl_async.asynchrony.actors import RolloutClient, RolloutWorker, Trainer
    from verl_async.config import WeightSyncConfig


@dataclass(slots=True)
class WeightSync:
    """Copies weights; a version is in force everywhere or the job ends."""

    trainer: Trainer
    workers: list[RolloutWorker]
    config: WeightSyncConfig
    dtype: str
    """Of the rollout workers; weights are cast to it before they travel."""
    interrupt: bool
    """Stop running generation between two tokens; else wait for its end."""
    generation_timeout_s: float
    """How long that end may take."""
    version: int = -1
    """Version in force; -1 before the first sync."""

    async def run(self) -> None:
        """Bring the next version to all workers; generation rests meanwhile.

        Raises:
            WeightsError: a worker acknowledged other bytes than the trainer sent.
            StuckError: it took longer than ``weight_sync.timeout_s``; names who did not answer.
        """
        async with AsyncExitStack() as stack:
            clients = [await self._pause(stack, worker) for worker in self.workers]
            version = self.version + 1
            checksum = await self._send(clients)
            acknowledged = await asyncio.gather(*(self._commit(client, version) for client in clients))
            for client, found in zip(clients, acknowledged, strict=True):
                if found != checksum:
                    raise WeightsError(
                        f"{client.name} acknowledged version {version} with checksum {found:#010x}, but the trainer sent "
                        f"{checksum:#010x}"
                    )
            self.version = version

    async def _pause(self, stack: AsyncExitStack, worker: RolloutWorker) -> RolloutClient:
        limit = self.config.timeout_s if self.interrupt else self.config.timeout_s + self.generation_timeout_s
        return await within(
            limit,
            f"{worker.name} did not stop generating for a weight sync",
            stack.enter_async_context(worker.paused(interrupt=self.interrupt)),
        )

    async def _send(self, clients: list[RolloutClient]) -> int:
        """Send all buckets through two slots: one is read while the other is written. Return the combined checksum."""
        buckets = await within(
            self.config.timeout_s,
            "the trainer did not plan the weight buckets",
            self.trainer.plan_weight_buckets(self.config.bucket_bytes, self.dtype),
        )
        checksums = []
        reading: list[asyncio.Future[list[None]] | None] = [None, None]
        try:
            for index in range(len(buckets)):
                slot = index % 2
                await self._read(reading[slot])
                delivery = await within(
                    self.config.timeout_s,
                    f"the trainer did not write weight bucket {index + 1} of {len(buckets)}",
                    self.trainer.write_weight_bucket(index, slot),
                )
                checksums.append(delivery.checksum)
                reading[slot] = asyncio.gather(*(client.load_bucket(delivery) for client in clients))
            for pending in (reading[len(buckets) % 2], reading[(len(buckets) + 1) % 2]):
                await self._read(pending)
        finally:
            for pending in reading:
                if pending is not None:
                    pending.cancel()
        return combine_checksums(checksums)

    async def _read(self, pending: asyncio.Future[list[None]] | None) -> None:
        """Wait until every worker has read a slot."""
        if pending is not None:
            names = ", ".join(worker.name for worker in self.workers)
            await within(self.config.timeout_s, f"{names}: not all took a weight bucket", pending)

    async def _commit(self, client: RolloutClient, version: int) -> int:
        return await within(
            self.config.timeout_s,
            f"{client.name} did not acknowledge weights version {version}",
            client.commit_weights(version),
        )
