"""The trainer ranks as Ray actors, and all of them as one `Trainer`."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import ray

from verl_async.asynchrony.actors import BucketDelivery
from verl_async.asynchrony.trainer_host import TrainerHost
from verl_async.asynchrony.waiting import within
from verl_async.ray.answers import answer, answers
from verl_engine.engine.worker import EngineWorker

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from verl_async.asynchrony.actors import RankBatches
    from verl_async.config import SftTrainerConfig, TrainerConfig
    from verl_async.ray.rollout import RayRolloutClient
    from verl_engine.batch.sequence import Sequence
    from verl_engine.contract.engine_config import EngineConfig
    from verl_engine.engine.base import LossFn
    from verl_engine.engine.train_step import StepReport
    from verl_engine.engine.weight_bucket import WeightBucket


class TrainerActor:
    """One rank; blocking methods, called one after the other."""

    def __init__(self, config: EngineConfig, model_folder: Path, rank: int, num_ranks: int) -> None:
        """Load the backend's hooks; nothing heavy yet."""
        self._worker = EngineWorker(config, model_folder, rank, num_ranks)
        self._host = TrainerHost(self._worker, rank)

    def address(self, port: int | None) -> tuple[str, str]:
        """Return this node's id, and where the process group can meet on it.

        Args:
            port: as configured, or None for a free one.
        """
        context = ray.get_runtime_context()
        host = ray.util.get_node_ip_address()
        if port is None:
            with socket.socket() as probe:
                probe.bind((host, 0))
                port = probe.getsockname()[1]
        return context.get_node_id(), f"tcp://{host}:{port}"

    def start(self, init_method: str, timeout_s: float) -> None:
        """Join the process group and build the engine."""
        self._worker.prepare(init_method, timeout_s)
        self._worker.create("actor")

    def train_batch(self, micro_batches: list[list[Sequence]], loss_fn: LossFn, temperature: float) -> StepReport:
        """See `EngineWorker.train_batch`."""
        return self._worker.train_batch(micro_batches, loss_fn, temperature)

    def infer_batch(
        self, micro_batches: list[list[Sequence]], temperature: float
    ) -> list[list[npt.NDArray[np.float32]]]:
        """See `EngineWorker.infer_batch`."""
        return self._worker.infer_batch(micro_batches, temperature)

    def plan_weight_buckets(self, bucket_bytes: int, dtype: str) -> list[WeightBucket]:
        """See `TrainerHost.plan_weight_buckets`."""
        return self._host.plan_weight_buckets(bucket_bytes, dtype)

    def open_slots(self) -> list[str]:
        """See `TrainerHost.open_slots`."""
        return self._host.open_slots()

    def unlink_slots(self) -> None:
        """See `TrainerHost.unlink_slots`."""
        self._host.unlink_slots()

    def write_weight_bucket(self, index: int, slot: int) -> tuple[int | npt.NDArray[np.uint8], int]:
        """See `TrainerHost.write_weight_bucket`."""
        return self._host.write_weight_bucket(index, slot)

    def save_pretrained(self, folder: Path) -> None:
        """See `EngineWorker.save_pretrained`."""
        self._worker.save_pretrained(folder)

    def close(self) -> None:
        """Leave the process group."""
        self._worker.close()


class RayTrainer:
    """All ranks as one `Trainer`."""

    def __init__(
        self,
        engine: EngineConfig,
        model_folder: Path,
        config: TrainerConfig | SftTrainerConfig,
        options: dict[str, Any],
    ) -> None:
        """Start the actors; `start` waits for them."""
        self.num_ranks = config.num_ranks
        self._config = config
        self._names = [f"trainer rank {rank}" for rank in range(config.num_ranks)]
        self._buckets: list[WeightBucket] = []
        self.node_id = ""
        actor = ray.remote(TrainerActor)
        self.actors = [
            actor.options(**options).remote(engine, model_folder, rank, config.num_ranks)
            for rank in range(config.num_ranks)
        ]

    async def start(self) -> None:
        """Bring all ranks into one process group and build the engines."""
        timeout_s = self._config.timeout_s
        self.node_id, address = await within(
            timeout_s,
            "trainer rank 0 did not start",
            answer(self.actors[0].address.remote(self._config.master_port), self._names[0]),
        )
        await within(timeout_s, "the trainer ranks did not build their engines", self._all("start", address, timeout_s))

    async def share_slots(self, readers: list[RayRolloutClient], timeout_s: float) -> None:
        """Lay buckets into shared memory from now on, and let the readers map it; needs a plan.

        Raises:
            WeightsError: there is not enough room for two buckets.
            StuckError: a reader did not map them in time.
        """
        first = self.actors[0]
        paths = await within(timeout_s, f"{self._names[0]} did not make buffers", answer(first.open_slots.remote(), self._names[0]))
        try:
            await within(
                timeout_s,
                f"{', '.join(reader.name for reader in readers)}: not all mapped the weight buffers",
                asyncio.gather(*(reader.attach_slots(paths) for reader in readers)),
            )
        finally:
            await within(timeout_s, f"{self._names[0]} did not unlink its buffers", answer(first.unlink_slots.remote(), self._names[0]))

    async def train_batch(self, batches: RankBatches, loss_fn: LossFn, temperature: float) -> StepReport:
        """Make one optimizer step; every rank reports the same."""
        reports = await self._each("train_batch", batches, loss_fn, temperature)
        report: StepReport = reports[0]
        return report

    async def infer_batch(self, batches: RankBatches, temperature: float) -> list[list[list[npt.NDArray[np.float32]]]]:
        """Compute log-probs with the weights as they are."""
        return await self._each("infer_batch", batches, temperature)

    async def plan_weight_buckets(self, bucket_bytes: int, dtype: str) -> list[WeightBucket]:
        """Divide the weights into buckets, on every rank alike."""
        self._buckets = (await self._all("plan_weight_buckets", bucket_bytes, dtype))[0]
        return self._buckets

    async def write_weight_bucket(self, index: int, slot: int) -> BucketDelivery:
        """Gather a bucket; its bytes stay in shared memory or in Ray's object store."""
        first = self.actors[0]
        payload, checksum = first.write_weight_bucket.options(num_returns=2).remote(index, slot)
        others = [actor.write_weight_bucket.remote(index, slot) for actor in self.actors[1:]]
        found, *_ = await answers([checksum, *others], self._names)
        return BucketDelivery(self._buckets[index], payload, found)

    async def save_pretrained(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        await within(
            self._config.timeout_s, "the trainer did not save the model", self._all("save_pretrained", folder)
        )

    async def close(self) -> None:
        """Leave the process group; the cluster ends the actors."""
        await within(30.0, "the trainer ranks did not leave their process group", self._all("close"))

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call every rank with the same arguments."""
        return await answers([getattr(actor, method).remote(*args) for actor in self.actors], self._names)

    async def _each(self, method: str, batches: RankBatches, *args: Any) -> list[Any]:
        """Call every rank with its own batches."""
        return await answers(
            [getattr(actor, method).remote(own, *args) for actor, own in zip(self.actors, batches, strict=True)],
            self._names,
        )
