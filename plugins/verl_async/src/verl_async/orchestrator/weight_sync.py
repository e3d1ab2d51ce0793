"""New weights from the trainer to every rollout worker, bucket by bucket, acknowledged by version and checksum."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_async.orchestrator.shared_slots import NUM_SLOTS
from verl_async.orchestrator.waiting import TimeLimit, end, together, within
from verl_async.rollout.interface import Acknowledgement
from verl_engine.contract.errors import WeightsError
from verl_engine.engine.weights.bucket import combine_checksums

if TYPE_CHECKING:
    from collections.abc import Mapping

    from verl_async.config import WeightSyncConfig
    from verl_async.orchestrator.actors import BucketDelivery, RolloutClient, Trainer
    from verl_async.orchestrator.rollout_worker import RolloutWorker
    from verl_engine.engine.weights.bucket import WeightBucket


@dataclass(slots=True)
class WeightSync:
    """Copies weights; a version is current everywhere or the job ends, with the workers paused."""

    trainer: Trainer
    workers: list[RolloutWorker]
    config: WeightSyncConfig
    dtype: str
    """Of the rollout workers; weights are cast to it before they travel."""
    interrupt: bool
    """Stop running generation between two tokens, to go on with the new weights; else wait for its end."""
    generation_timeout_s: float
    """How long that end may take."""
    version: int = -1
    """Current version; -1 before the first sync."""

    async def run(self) -> None:
        """Bring the next version to all workers; generation rests meanwhile.

        Raises:
            WeightsError: a worker acknowledged another version or other bytes than the trainer sent.
            StuckError: stopping generation, or all the rest, took longer than ``weight_sync.timeout_s``; names who did
                not answer.
        """
        await together(*map(self._pause, self.workers))
        clients = [worker.client for worker in self.workers]
        limit = TimeLimit(self.config.timeout_s)
        version = self.version + 1
        sent = Acknowledgement(version, await self._send(clients, version, limit))
        acknowledged = await together(*(self._commit(client, version, limit) for client in clients))
        for client, receivers in zip(clients, acknowledged, strict=True):
            for receiver, found in receivers.items():
                if found != sent:
                    raise WeightsError(
                        f"{client.name} ({receiver}) acknowledged version {found.version} with checksum "
                        f"{found.checksum:#010x}, but the trainer sent version {sent.version} with checksum "
                        f"{sent.checksum:#010x}"
                    )
        await together(*(self._resume(worker, limit) for worker in self.workers))
        self.version = sent.version

    async def _pause(self, worker: RolloutWorker) -> None:
        limit_s = self.config.timeout_s if self.interrupt else self.config.timeout_s + self.generation_timeout_s
        who = f"{worker.name} did not stop generating for a weight sync"
        await within(limit_s, who, worker.pause("abort" if self.interrupt else "wait"))

    async def _resume(self, worker: RolloutWorker, limit: TimeLimit) -> None:
        await limit.within(f"{worker.name} did not go on after a weight sync", worker.resume())

    async def _send(self, clients: list[RolloutClient], version: int, limit: TimeLimit) -> int:
        """Send all buckets through two slots: one is read while the next is written into the other.

        A worker reads one bucket at a time: its engine takes calls from one thread, and the checksums in their order.

        Returns:
            The combined checksum.
        """
        buckets = await limit.within(
            "the trainer did not plan the weight buckets",
            self.trainer.plan_weight_buckets(self.config.bucket_bytes, self.dtype),
        )
        await self._begin(clients, version, buckets, limit)
        checksums = []
        reading: asyncio.Future[list[None]] = asyncio.ensure_future(together())
        try:
            for index in range(len(buckets)):
                which = f"weight bucket {index + 1} of {len(buckets)}"
                delivery = await limit.within(
                    f"the trainer did not write {which}", self.trainer.write_weight_bucket(index, index % NUM_SLOTS)
                )
                checksums.append(delivery.checksum)
                await reading
                loads = [self._load(client, delivery, which, limit) for client in clients]
                reading = asyncio.ensure_future(together(*loads))
            await reading
        finally:
            await end(reading)
        return combine_checksums(checksums)

    async def _begin(
        self, clients: list[RolloutClient], version: int, plan: list[WeightBucket], limit: TimeLimit
    ) -> None:
        """Tell every worker what comes, and how."""
        try:
            transport = await limit.within("the trainer did not open a transport", self.trainer.open_transport())
            who = f"{', '.join(client.name for client in clients)}: not all began weights version {version}"
            await limit.within(who, together(*(client.begin_weights(version, plan, transport) for client in clients)))
        finally:  # also where Ctrl-C comes before the answer: files would stay behind
            await within(
                self.config.timeout_s, "the trainer did not unlink its buffers", self.trainer.release_transport()
            )

    async def _load(self, client: RolloutClient, delivery: BucketDelivery, which: str, limit: TimeLimit) -> None:
        await limit.within(f"{client.name} did not take {which}", client.load_bucket(delivery))

    async def _commit(self, client: RolloutClient, version: int, limit: TimeLimit) -> Mapping[str, Acknowledgement]:
        return await limit.within(
            f"{client.name} did not acknowledge weights version {version}", client.commit_weights(version)
        )
